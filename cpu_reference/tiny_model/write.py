"""Writes a checkpoint folder that SGLang loads like any other."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from tiny_model.spec import TinySpec
from tiny_model.weights import make_weights

STAMP_FILE = "tiny_model.stamp"


def write_checkpoint(out: "os.PathLike[str] | str", spec: TinySpec = TinySpec()) -> bool:
    """Write config, tokenizer and weights of ``spec`` to the folder ``out``.

    Returns False, leaving the folder as it is, where it holds the same spec already. The folder appears whole or not at
    all, so that processes may race for it.
    """
    out = Path(out)
    if _stamp_of(out) == spec.stamp:
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _write_files(fresh, spec)
        if _stamp_of(out) == spec.stamp:  # another process was first, and may be reading it
            return False
        if out.exists():
            shutil.rmtree(out)
        os.replace(fresh, out)
    except OSError:
        if _stamp_of(out) != spec.stamp:  # else another process was first
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True


def _stamp_of(folder: Path) -> str:
    try:
        return (folder / STAMP_FILE).read_text()
    except OSError:
        return ""


def _write_files(folder: Path, spec: TinySpec) -> None:
    from safetensors.torch import save_file

    _write_json(folder / "config.json", spec.hf_config())
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _write_tokenizer(folder, spec.vocab)
    save_file(make_weights(spec), folder / "model.safetensors")
    (folder / STAMP_FILE).write_text(spec.stamp)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """One word a token: ``w17`` is token 17; 0 to 2 are begin, end and unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, "</s>": 1, "<unk>": 2}
    words.update({f"w{i}": i for i in range(len(words), vocab)})
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 16384,
    }
    _write_json(folder / "tokenizer_config.json", config)
