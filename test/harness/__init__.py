"""Drives real SGLang on a CPU for tests: one scheduler in this process, a server, a prefill-decode pair.

Import this package before ``sglang``, ``torch`` or ``triton``: it sets the environment they read.
"""

from harness import environment

environment.prepare()

__all__ = ["environment"]
