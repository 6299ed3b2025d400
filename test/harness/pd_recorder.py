"""An SGLang plugin for the servers of a pair: writes down where latent rows and index keys were sent, and when.

Loaded where `install` has put its entry point on the path; writes to the folder that ``PD_RECORD`` names. On one machine all memory is
alike, so equal tokens alone do not show that a transfer went to the right kind of memory; the addresses do. Servers load a
copy, which imports nothing of the harness: a stock server's path must not get the patched tree.

``PD_SLOW=RANK:SECONDS`` has the prefill node sleep so long in the middle of each write to that rank of a decode node, over mooncake.
"""

import atexit
import functools
import importlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

ENTRY_POINTS = "[sglang.srt.plugins]\npd_recorder = pd_recorder:activate\n"
METADATA = "Metadata-Version: 2.1\nName: pd-recorder\nVersion: 0\n"


def install(folder: Path) -> Dict[str, str]:
    """Prepare a folder for records; returns the environment of the servers, ``PYTHONPATH`` holding what to add to it."""
    folder.mkdir(parents=True)
    return {"PD_RECORD": str(folder), "PYTHONPATH": _plugin()}


@functools.cache
def _plugin() -> str:
    """The folder with the plugin; one, so that servers forked from one parent can share it."""
    folder = Path(tempfile.mkdtemp(prefix="pd_recorder-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info = folder / "pd_recorder-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    shutil.copy(__file__, folder / "pd_recorder.py")
    return str(folder)


def read(folder: Path, name: str) -> List[Dict[str, Any]]:
    """Records of one kind, in the order written.

    "sent" by the prefill node; of the decode node "places", "announced" (a destination was sent) and "left" (its request is no
    longer in transfer). Times are of the machine's monotonic clock.
    """
    path = Path(folder) / f"{name}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last one may be half written


def activate() -> None:
    """Entry point, called in the launcher and in each scheduler process."""
    for backend, manager in (("mooncake", "MooncakeKVManager"), ("nixl", "NixlKVManager")):
        try:
            module = importlib.import_module(f"sglang.srt.disaggregation.{backend}.conn")
        except ImportError:
            continue
        _record_sent(getattr(module, manager))
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue

    _record_places(DecodePreallocQueue)
    _record_lives(DecodePreallocQueue, DecodeTransferQueue)


def _write(name: str, record: Dict[str, Any]) -> None:
    with open(Path(os.environ["PD_RECORD"]) / f"{name}.jsonl", "a") as out:
        out.write(json.dumps(record) + "\n")


def _record_sent(manager) -> None:
    from sgl_cpu_ref import nixl_dram

    send = manager._send_kvcache_generic

    @functools.wraps(send)
    def recorded(self, **call):
        source, target = call["prefill_data_indices"], call["dst_data_indices"]
        peer = getattr(self, "decode_kv_args_table", {}).get(call.get("mooncake_session_id"))
        rank = peer.dst_tp_rank if peer is not None else 0
        begin = time.monotonic()
        slow_rank, seconds = os.environ.get("PD_SLOW", "-1:0").split(":")
        if rank == int(slow_rank):
            time.sleep(float(seconds))
        with nixl_dram.recording() as requests:
            result = send(self, **call)
        _write(
            "sent",
            {
                "to_rank": rank,
                "begin": begin,
                "end": time.monotonic(),
                "latent": list(call["src_data_ptrs"]) == list(self.kv_args.kv_data_ptrs),
                "pointers": [int(p) for p in call["dst_data_ptrs"]],
                "page_bytes": [int(n) for n in call["item_lens"]],
                "prefill_pages": [int(i) for i in source],
                "decode_pages": [int(i) for i in target],
                "nixl": requests,
            },
        )
        return result

    manager._send_kvcache_generic = recorded


def _record_places(queue) -> None:
    from sgl_cpu_ref import nixl_dram

    build = queue._init_kv_manager

    @functools.wraps(build)
    def recorded(self):
        with nixl_dram.recording() as requests:
            manager = build(self)
        pool = self.token_to_kv_pool
        host = getattr(pool, "host_pool", None)
        _write(
            "places",
            {
                "host": _ranges(host.kv_buffer) if host is not None else [],
                "windows": _ranges(pool.kv_buffer),
                "index_keys": _ranges(pool.index_k_with_scale_buffer),
                "nixl": requests,
            },
        )
        return manager

    queue._init_kv_manager = recorded


def _ranges(layers) -> List[List[int]]:
    """First address and bytes of each layer."""
    return [[layer.data_ptr(), layer.nbytes] for layer in layers]


def _record_lives(prealloc_queue, transfer_queue) -> None:
    """When each destination was announced, and when its request left the transfer queue."""
    pop_preallocated, pop_transferred = prealloc_queue.pop_preallocated, transfer_queue.pop_transferred

    @functools.wraps(pop_preallocated)
    def announced(self, *args):
        begin = time.monotonic()
        entries, failed = pop_preallocated(self, *args)
        for entry in entries:
            slots = self.req_to_token_pool.req_to_token[entry.req.req_pool_idx, : len(entry.req.origin_input_ids)]
            pages = sorted(set((slots // self.token_to_kv_pool.page_size).tolist()))
            _write("announced", {"room": entry.req.bootstrap_room, "rank": self.tp_rank, "time": begin, "pages": pages})
        return entries, failed

    @functools.wraps(pop_transferred)
    def left(self, *args):
        before = [entry.req.bootstrap_room for entry in self.queue]
        popped = pop_transferred(self, *args)
        still = {entry.req.bootstrap_room for entry in self.queue}
        for room in before:
            if room not in still:
                _write("left", {"room": room, "rank": self.tp_rank, "time": time.monotonic()})
        return popped

    prealloc_queue.pop_preallocated, transfer_queue.pop_transferred = announced, left
