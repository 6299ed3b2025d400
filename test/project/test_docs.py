"""What the documents say of names and numbers is what the code says."""

import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path

import harness  # noqa: F401  (sets the environment; before sglang)
import pytest

from sglang.srt.mem_cache.sparsity.nsa_offload import collector, plan
from sglang.srt.mem_cache.sparsity.nsa_offload.config import NSAKVOffloadConfig

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
NAMES = {collector.PREFIX + name for name in (*collector.GAUGES, *collector.COUNTERS)}


def test_dashboard_shows_every_metric_and_no_other():
    text = (ROOT / "docs" / "grafana.json").read_text()
    board = json.loads(text)
    shown = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(rf"{collector.PREFIX}\w+", target["expr"])
    }
    assert shown == NAMES
    assert set(re.findall(rf"{collector.PREFIX}\w+", text)) == NAMES


def test_guide_names_every_metric():
    assert {collector.PREFIX + name for name in re.findall(r"^\| `(\w+)(?:\{.*\})?` \|", GUIDE.split("## Metrics")[1].split("\n## ")[0], re.M)} == NAMES


@pytest.mark.parametrize("block", re.findall(r"```\n\$ python -m [\w.]+plan (.*?)```", GUIDE, re.DOTALL))
def test_sizing_answers_are_those_of_the_command(block):
    command, _, answer = block.replace("\\\n", " ").partition("\n")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        plan.main([word.strip("'") for word in command.split()])
    assert out.getvalue().strip() == answer.strip(), "run the command again and paste its answer"


def test_guide_names_every_setting():
    table = GUIDE.split("## Settings")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    keys = {field.name for field in dataclasses.fields(NSAKVOffloadConfig)}
    assert named == keys, "docs/guide.md, Settings: one row for each key, with its default and why"


def test_guide_has_sizing_answers():
    assert len(re.findall(r"nsa_offload\.plan", GUIDE)) >= 2


def _sources():
    folders = ("mem_cache/sparsity/nsa_offload", "arg_groups", "disaggregation", "layers/attention/nsa")
    return [p for f in folders for p in sorted((ROOT / "python/sglang/srt" / f).glob("*.py"))]


def test_quoted_errors_exist():
    """Each error in the table of symptoms is a text of the code, its values left open as `...`."""
    code = " ".join(path.read_text() for path in _sources())
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    table = GUIDE.split("## When something is wrong")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)`", table, re.M)
    assert len(quoted) >= 8
    for text in quoted:
        for part in filter(None, (p.strip() for p in text.split("..."))):
            assert part in code, part
