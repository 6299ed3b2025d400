"""Stub of sgl_kernel for machines without a GPU: holds only what SGLang imports unconditionally.

The top-k functions are added by the ``sgl_cpu_ref`` plugin; the KV transfer functions are in ``kvcacheio``.
"""
