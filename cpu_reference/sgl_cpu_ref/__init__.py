"""Torch references for the CUDA-only leaf kernels on SGLang's DSA ("NSA") path.

This is an SGLang plugin (entry-point group ``sglang.srt.plugins``). With this package's folder on ``PYTHONPATH`` and
``SGLANG_USE_CPU_ENGINE=1`` in the environment, the launcher, the engine and every scheduler process load it by themselves.
Everything above the leaf kernels (scheduler, allocator, pools, indexer control flow, attention backend, disaggregation)
stays SGLang's own.
"""

from sgl_cpu_ref.plugin import activate, is_active

__all__ = ["activate", "is_active"]
