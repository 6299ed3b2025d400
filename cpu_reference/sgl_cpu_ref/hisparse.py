"""HiSparse, the peer feature in the tree, on a CPU.

Its swap-in kernel is replaced by upstream's own slow version of it (``naive_load_topk``), its backup copy by the one in
the ``sgl_kernel`` stub, and its coordinator, which upstream builds on CUDA only, is built here.
"""


def enable_on_cpu() -> None:
    import torch

    import sgl_kernel.kvcacheio as kvcacheio
    from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator
    from sglang.srt.mem_cache import hisparse_memory_pool
    from sglang.srt.mem_cache.sparsity import parse_hisparse_config
    from sglang.srt.model_executor.model_runner import ModelRunner

    torch.cpu.Stream.synchronize = lambda self: None
    hisparse_memory_pool.transfer_kv_all_layer_mla = kvcacheio.transfer_kv_all_layer_mla
    HiSparseCoordinator.swap_in_selected_pages = HiSparseCoordinator.naive_load_topk

    upstream_init = ModelRunner.init_attention_backend

    def init_attention_backend(self):
        upstream_init(self)
        if self.device != "cpu" or not getattr(self, "enable_hisparse", False):
            return
        config = parse_hisparse_config(self.server_args)
        self.hisparse_coordinator = HiSparseCoordinator(
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            top_k=getattr(self.model_config.hf_text_config, "index_topk", config.top_k),
            device_buffer_size=config.device_buffer_size,
            device=self.device,
            tp_group=self.tp_group.cpu_group,
            host_to_device_ratio=config.host_to_device_ratio,
        )

    ModelRunner.init_attention_backend = init_attention_backend
