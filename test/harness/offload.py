"""Settings that tests of decode KV offloading share: a small window, so that short prompts evict."""

import json
import random
from typing import Any, Dict, List, Sequence

from harness.environment import ON_GPU

WINDOW = 128
TOP_K = 64


def prompts(lengths: Sequence[int], seed: int = 0) -> List[List[int]]:
    """Random prompts of these lengths, without the special tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 2048) for _ in range(n)] for n in lengths]


def server_args(kv_cache_dtype: str = "bfloat16", **more) -> Dict[str, Any]:
    """Arguments of both sides of a comparison."""
    return {
        "kv_cache_dtype": kv_cache_dtype,
        "nsa_decode_backend": "flashmla_sparse" if kv_cache_dtype == "bfloat16" else "flashmla_kv",
        "disable_radix_cache": True,
        **more,
    }


def offload_args(window: int = WINDOW, **config) -> Dict[str, Any]:
    """What switches offloading on, beside `server_args`."""
    return {
        "enable_decode_nsa_kv_offload": True,
        "decode_nsa_kv_offload_config": json.dumps({"window_size": window, **config}),
    }


def speculation_args(steps: int) -> Dict[str, Any]:
    """What switches speculation on; 0 steps for none. Its CUDA graphs ask for a GPU."""
    if not steps:
        return {}
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
        "disable_cuda_graph": not ON_GPU,
    }


def command_line(kv_cache_dtype: str = "bfloat16") -> List[str]:
    """`server_args` that concern the KV dtype, for a server's command line."""
    backend = server_args(kv_cache_dtype)["nsa_decode_backend"]
    return ["--kv-cache-dtype", kv_cache_dtype, "--nsa-decode-backend", backend]


def offload_command_line(window: int = WINDOW, **config) -> List[str]:
    """`offload_args` for a server's command line."""
    args = offload_args(window, **config)
    return ["--enable-decode-nsa-kv-offload", "--decode-nsa-kv-offload-config", args["decode_nsa_kv_offload_config"]]


def coordinator(engine):
    """The offload coordinator of an `InprocScheduler`."""
    return engine.scheduler.req_to_token_pool.sparse_coordinator


def check_idle(engine) -> None:
    """SGLang's own idle checks, then that no window, staging page or residency entry is left."""
    engine.idle_checks()
    coordinator(engine).check_idle()
    pool = engine.scheduler.req_to_token_pool
    assert len(pool.free_slots) == pool.req_to_token.shape[0] - 1, "request rows are left"
    allocator = engine.scheduler.token_to_kv_pool_allocator
    assert allocator.available_size() == allocator.size, "logical slots are left"
