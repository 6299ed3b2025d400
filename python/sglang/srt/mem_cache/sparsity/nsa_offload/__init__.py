"""Decode with the latent KV of DeepSeek sparse attention in host memory.

Enabled by ``--enable-decode-nsa-kv-offload``. Reading order: ``config``, ``sizing``,
``host_pool``, ``device_pool``, ``lru_cache``, ``controller``, ``adaptor``, ``coordinator``.
"""
