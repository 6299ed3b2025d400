"""Environment, import paths and the tiny checkpoint for every test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import environment  # noqa: E402  (before sglang, torch and triton)


@pytest.fixture(scope="session")
def tiny_model() -> str:
    """Folder of the tiny DeepSeek-V3.2 checkpoint, written once into build/models."""
    from tiny_model import TinySpec, write_checkpoint

    folder = environment.MODELS / "tiny"
    write_checkpoint(folder, TinySpec())
    return str(folder)


@pytest.fixture(scope="session")
def draft_model() -> str:
    """Folder of a tiny checkpoint with a layer that drafts; half its drafts are accepted."""
    from tiny_model import TinySpec, write_checkpoint

    folder = environment.MODELS / "tiny_draft"
    write_checkpoint(folder, TinySpec(drafts=0.5))
    return str(folder)
