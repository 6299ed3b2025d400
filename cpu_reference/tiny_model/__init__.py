"""A tiny DeepSeek-V3.2 checkpoint whose greedy output depends on single KV rows; see README.md beside this package."""

from tiny_model.spec import TinySpec
from tiny_model.write import write_checkpoint

__all__ = ["TinySpec", "write_checkpoint"]
