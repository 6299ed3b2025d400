"""nixl on host memory: SGLang names its own memory VRAM, which no backend of a CPU machine can register."""


def map_vram_to_dram() -> None:
    """Replace ``nixl_agent`` by a subclass that registers and describes "VRAM" as "DRAM". No-op without nixl."""
    try:
        import nixl._api as api
    except ImportError:
        return

    def place(mem_type):
        return "DRAM" if mem_type == "VRAM" else mem_type

    class DramAgent(api.nixl_agent):
        def register_memory(self, reg_list, mem_type=None, *args, **kwargs):
            return super().register_memory(reg_list, place(mem_type), *args, **kwargs)

        def get_xfer_descs(self, descs, mem_type=None, *args, **kwargs):
            return super().get_xfer_descs(descs, place(mem_type), *args, **kwargs)

    api.nixl_agent = DramAgent
