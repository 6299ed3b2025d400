#!/bin/sh
# Make .venv and install the pinned requirements: sh tools/setup.sh VENV
#
# Needs a Python that can make a virtual environment. On Debian, as root, the
# package that may be missing for it is installed; otherwise it is named.
set -eu

venv=$1

usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
        >/dev/null 2>&1
}

find_python() {
    for name in python3.11 python3.12 python3.13 python3; do
        if command -v "$name" >/dev/null && usable "$name"; then
            command -v "$name"
            return
        fi
    done
    return 1
}

if ! find_python >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv
fi

# Without a GPU, the CUDA kernels' own source runs, made by g++.
if ! command -v g++ >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++
    fi
    command -v g++ >/dev/null || { echo "setup: needs g++: apt-get install g++" >&2; exit 1; }
fi

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python) || {
        echo "setup: needs Python 3.11 to 3.13 with venv; on Debian: apt-get install python3-venv" >&2
        exit 2
    }
    "$python" -m venv "$venv"
fi

"$venv/bin/python" -m pip install --quiet -r requirements.txt -r requirements-test.txt
"$venv/bin/python" -m pip install --quiet --no-deps -r requirements-nodeps.txt

# Prefill-decode pairs: libraries that mooncake links, then the transfer backends and the
# router. Tests that need what is missing skip, and say what it is.
libraries="libcurl4 libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # shellcheck disable=SC2086
    dpkg -s $libraries >/dev/null 2>&1 || {
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $libraries
    } || echo "setup: pairs over mooncake need: apt-get install $libraries" >&2
fi
grep -v '^#' requirements-pd.txt | while read -r package; do
    "$venv/bin/python" -m pip install --quiet --no-deps "$package" ||
        echo "setup: without $package; tests of pairs that need it will skip" >&2
done
