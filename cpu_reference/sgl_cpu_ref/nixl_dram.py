"""nixl on host memory: SGLang names its own memory VRAM, which no backend of a CPU machine can register.

What SGLang asked for can be recorded. Here every address works as either type, so that equal tokens say nothing about the
types; the record does.
"""

import threading
from contextlib import contextmanager
from typing import Iterator, List, NamedTuple, Optional
from unittest import mock

PROGRESS_DELAY_US = 1000
_local = threading.local()


class Request(NamedTuple):
    """One call of an agent, with the memory type that SGLang named."""

    call: str
    """"register_memory" or "get_xfer_descs"."""
    memory_type: Optional[str]
    regions: List[List[int]]
    """(address, bytes, device id) of each region."""


@contextmanager
def recording() -> Iterator[List[Request]]:
    """While open, collects the requests of this thread; one at a time in a thread."""
    _local.requests = requests = []
    try:
        yield requests
    finally:
        _local.requests = None


def map_vram_to_dram() -> None:
    """Replace ``nixl_agent`` by a subclass that registers and describes "VRAM" as "DRAM". No-op without nixl.

    Its progress thread, which spins on a core of its own in each process, waits a millisecond between its rounds.
    """
    try:
        import nixl._api as api
    except ImportError:
        return

    class PatientConfig(api.nixlBind.nixlAgentConfig):
        def __setattr__(self, name, value):
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    class DramAgent(api.nixl_agent):
        def __init__(self, *args, **kwargs):
            with mock.patch.object(api.nixlBind, "nixlAgentConfig", PatientConfig):
                super().__init__(*args, **kwargs)

        def register_memory(self, reg_list, mem_type=None, *args, **kwargs):
            _record("register_memory", mem_type, reg_list)
            return super().register_memory(reg_list, _place(mem_type), *args, **kwargs)

        def get_xfer_descs(self, descs, mem_type=None, *args, **kwargs):
            _record("get_xfer_descs", mem_type, descs)
            return super().get_xfer_descs(descs, _place(mem_type), *args, **kwargs)

    api.nixl_agent = DramAgent


def _place(mem_type):
    return "DRAM" if mem_type == "VRAM" else mem_type


def _record(call: str, mem_type, regions) -> None:
    requests = getattr(_local, "requests", None)
    if requests is not None:
        requests.append(Request(call, mem_type, [[int(number) for number in region[:3]] for region in regions]))
