"""The plugin's entry point: puts every reference in its place.

Environment, read once at activation:

* ``SGL_CPU_REF_TRITON=1``: keep SGLang's own Triton kernels (allocator, pools, quantisation, index buffer) instead of the
  torch references. They then run under the Triton interpreter: about a hundred times slower, for comparisons only.
* ``SGL_CPU_REF_NIXL=0``: leave nixl alone.
* ``SGL_CPU_REF_SLOW_RANK=RANK:SECONDS``: delay one tensor-parallel rank, see `sgl_cpu_ref.slow_rank`.

Triton kernels that are not replaced (a feature's own) run under the Triton interpreter: activation sets
``TRITON_INTERPRET=1`` for this process and those it starts. See `interpret_triton` for what that can reach.
"""

import importlib.util
import os
import traceback

_active = False


def is_active() -> bool:
    """Whether the references are in place in this process."""
    return _active


def activate() -> None:
    """Put the references in place; does nothing where SGLang runs on a GPU, nor a second time.

    Raises SystemExit where SGLang does not have the shape this plugin was written for: SGLang's plugin loader swallows
    ordinary exceptions, and a server with half of its references would fail much later and obscurely.
    """
    global _active
    from sglang.srt.utils import is_cpu

    if _active or not is_cpu():
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    interpret_triton()
    try:
        if os.environ.get("SGL_CPU_REF_TRITON") != "1":
            _replace_triton_kernels()
        _replace_indexer_leaves()
        _replace_attention_leaves()
        _fit_host_memory()
        from sgl_cpu_ref import dp_attention, hisparse, matmul, nsa_swap, slow_rank, speculation

        if _has_module("sglang.jit_kernel.nsa_kv_offload"):  # a patched tree; stock SGLang has no such kernels
            nsa_swap.install()
        matmul.install()
        dp_attention.install()
        hisparse.enable_on_cpu()
        slow_rank.install()
        speculation.install()
        if os.environ.get("SGL_CPU_REF_NIXL", "1") == "1":
            from sgl_cpu_ref import nixl_dram

            nixl_dram.map_vram_to_dram()
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(f"sgl_cpu_ref does not fit this SGLang: {error!r}") from error
    _active = True


def interpret_triton() -> None:
    """Set ``TRITON_INTERPRET=1``, unless it is set already.

    Triton reads it when a kernel is decorated, so it reaches every module with kernels that is imported later in this
    process, and all of them in processes started from here (a server's schedulers). Where ``triton`` is imported
    already, kernels decorated so far, and Triton's own library functions, stay compiled ones: then only the environment
    of child processes changes in time. Tests set the variable before their first import.
    """
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _replace_triton_kernels() -> None:
    """Allocator, pool, quantisation and index-buffer kernels for which SGLang has Triton versions only."""
    import sglang.srt.utils
    from sgl_cpu_ref import allocator, index_buffer, kv_pool, quant
    from sgl_cpu_ref.patching import replace_everywhere, replace_static
    from sglang.srt.layers.attention.nsa import index_buf_accessor
    from sglang.srt.mem_cache import common

    def no_triton(backend) -> bool:
        return False

    replace_everywhere("sglang.srt.utils.common", "support_triton", no_triton)
    sglang.srt.utils.support_triton = no_triton
    common.support_triton = no_triton
    replace_everywhere("sglang.srt.mem_cache.common", "get_last_loc", common.get_last_loc_torch)
    pool = "sglang.srt.mem_cache.utils"
    replace_everywhere("sglang.srt.mem_cache.allocator", "alloc_extend_kernel", allocator.alloc_extend_kernel)
    replace_everywhere("sglang.srt.mem_cache.allocator", "alloc_decode_kernel", allocator.alloc_decode_kernel)
    replace_everywhere(pool, "set_mla_kv_buffer_triton", kv_pool.set_mla_kv_buffer)
    replace_everywhere(pool, "get_mla_kv_buffer_triton", kv_pool.get_mla_kv_buffer)
    nsa = "sglang.srt.layers.attention.nsa"
    replace_everywhere(f"{nsa}.quant_k_cache", "quantize_k_cache_separate", quant.quantize_k_cache_separate)
    replace_everywhere(f"{nsa}.triton_kernel", "act_quant", quant.act_quant)
    replace_static(index_buf_accessor.SetKAndS, "triton", index_buffer.set_k_and_s)
    replace_static(index_buf_accessor.GetK, "triton", index_buffer.get_k)
    replace_static(index_buf_accessor.GetS, "triton", index_buffer.get_s)
    replace_static(index_buf_accessor.GetKAndS, "triton", index_buffer.get_k_and_s)


def _replace_indexer_leaves() -> None:
    """The indexer takes its CUDA control flow (the deep_gemm one), with reference leaves."""
    import sgl_kernel
    from sgl_cpu_ref import hadamard, mqa_logits, topk
    from sgl_cpu_ref.patching import replace_everywhere

    replace_everywhere("sglang.jit_kernel.hadamard", "hadamard_transform", hadamard.hadamard_transform)
    for name in ("fast_topk_v2", "fast_topk_transform_fused", "fast_topk_transform_ragged_fused"):
        setattr(sgl_kernel, name, getattr(topk, name))

    from sglang.srt.layers.attention.nsa import nsa_indexer
    from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding

    from sgl_cpu_ref.rope import deepseek_rope

    Indexer = nsa_indexer.Indexer
    nsa_indexer._is_cuda = True
    nsa_indexer.deep_gemm = mqa_logits
    nsa_indexer.can_use_nsa_fused_store = lambda *args: False
    Indexer.forward_native = Indexer.forward_cuda
    Indexer._weights_proj_bf16_in_fp32_out = lambda self, x: mqa_logits.linear_fp32(x, self.weights_proj.weight)
    # Upstream asks torch.cuda.mem_get_info above eight million logits.
    Indexer._should_chunk_mqa_logits = lambda self, q, k, device: (False, 0)
    DeepseekScalingRotaryEmbedding.forward_native = deepseek_rope


def _replace_attention_leaves() -> None:
    """The attention calls of the NSA backend, and its questions about the GPU's generation."""
    import torch

    from sgl_cpu_ref import quant
    from sgl_cpu_ref.patching import with_device_capability
    from sgl_cpu_ref.sparse_mla import sparse_mla, varlen_mha
    from sglang.srt.layers.attention import nsa_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )
    from sglang.srt.server_args import ServerArgs

    with_device_capability(ServerArgs, "_handle_model_specific_adjustments")
    backend = nsa_backend.NativeSparseAttnBackend
    with_device_capability(backend, "__init__")

    def attend(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, **kwargs):
        return sparse_mla(q_all, kv_cache, page_table_1, sm_scale, v_head_dim)

    def attend_fa3(self, q_rope, kv_cache, v_head_dim, q_nope, page_table, sm_scale, **kwargs):
        return sparse_mla(torch.cat([q_nope, q_rope], -1), kv_cache, page_table, sm_scale, v_head_dim)

    def attend_dense(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, **kwargs):
        return varlen_mha(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)

    backend._forward_flashmla_sparse = attend
    backend._forward_flashmla_kv = attend
    backend._forward_fa3 = attend_fa3
    backend._compute_flashmla_metadata = lambda self, **kwargs: None
    nsa_backend.flash_attn_varlen_func = attend_dense
    nsa_backend.dequantize_k_cache_paged = quant.dequantize_k_cache_paged
    nsa_backend._cat = lambda tensors, dim=-1: torch.cat(tensors, dim=dim)
    # Plain MLA models (DeepSeek-V3) on torch_native: its extend path cannot do the split-head MHA prefill.
    AttentionBackendRegistry.register("torch_native", lambda attn, forward_batch: AttnForwardMethod.MLA)


def _fit_host_memory() -> None:
    """Host pools without cudaHostRegister."""
    from sglang.srt.mem_cache import memory_pool_host

    def allocate(dims, dtype, device, pin_memory, allocator):
        return allocator.allocate(dims, dtype=dtype, device=device)

    memory_pool_host.ALLOC_MEMORY_FUNCS["cpu"] = allocate
