# make setup   a virtual environment with all that is needed, without a GPU
# make build   SGLang with the series applied, in build/sglang
# make demo    see the feature at work
# make test    all tests, beside them every prefix of the series, then the count of touched lines
# make export  the series as git commits and mails, in build/export

VENV := .venv
PYTHON := $(VENV)/bin/python
SERIES := $(PYTHON) -m tools.series
STAMP := $(VENV)/.setup-done
JOBS := 2
CHECK := --tests

export SGLANG_USE_CPU_ENGINE := 1
export TORCHDYNAMO_DISABLE := 1
export HF_HUB_OFFLINE := 1
RUN := PYTHONPATH=cpu_reference:build/sglang/python $(PYTHON)

.PHONY: setup build demo test export clean

setup: $(STAMP)

$(STAMP): requirements.txt requirements-test.txt requirements-nodeps.txt requirements-pd.txt tools/setup.sh
	sh tools/setup.sh $(VENV)
	touch $@

build: setup
	$(SERIES) build
	$(PYTHON) -m compileall -q build/sglang/python cpu_reference  # each server imports it all, several times

demo: build
	PYTHONPATH=cpu_reference:build/sglang/python:test $(PYTHON) -m demo

# The series' own tests, test/srt, run once: each on the prefix that ends with its patch.
test: build
	$(SERIES) check $(CHECK) > build/prefixes.txt 2>&1 & prefixes=$$!; \
	$(RUN) -m pytest -n $(JOBS) --dist loadfile --durations 20 test/project test/serving; tests=$$?; \
	wait $$prefixes; checked=$$?; cat build/prefixes.txt; \
	test $$tests = 0 && test $$checked = 0
	$(SERIES) count --apart 12-nsa-offload-metrics

export: build
	rm -rf build/export
	$(SERIES) export build/export --mails

clean:
	rm -rf build
