"""Memory type of each latent-KV pointer, from the decode node's pool to the prefill node's descriptors.

nixl finds a remote address under the memory type and device id it was registered with. The
decode node sends one letter a pointer at the end of its registration; where the field is
missing or empty, every pointer is device memory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Optional

import requests

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.registration import remedy

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver

logger = logging.getLogger(__name__)

# Answered with 200 by the bootstrap server of a prefill node that reads the field.
ROUTE = "/nixl_kv_memory_types"
_LETTER_OF_TYPE = {"VRAM": b"V", "DRAM": b"D"}
_TYPE_OF_LETTER = {ord(letter): name for name, letter in _LETTER_OF_TYPE.items()}


def kv_memory_types(token_to_kv_pool: Any, num_pointers: int) -> list[str]:
    """Types of a node's latent-KV pointers, in their order.

    Args:
        token_to_kv_pool: the target model's pool, whose pointers come first; one with
            host memory has ``get_contiguous_buf_memory_types``.
        num_pointers: with those of a draft model's pool, which are device memory.
    """
    own = getattr(token_to_kv_pool, "get_contiguous_buf_memory_types", list)()
    return own + ["VRAM"] * (num_pointers - len(own))


def register_kv_memory(agent: Any, regions: list[tuple], kv_args: "KVArgs") -> list:
    """Register latent-KV regions, each under its memory type; host memory has device id 0.

    Args:
        regions: ``(address, bytes, device id, "")`` in the order of the pointers.

    Returns:
        The agent's descriptors, one for each type; empty where a registration failed.

    Raises:
        RuntimeError: the agent says why it failed; names the bytes and the remedy.
    """
    types = _types_of(kv_args)
    registered = []
    for name in _LETTER_OF_TYPE:
        chosen = [
            (address, size, device_of(name, device), tag)
            for (address, size, device, tag), own in zip(regions, types)
            if own == name
        ]
        if not chosen:
            continue
        try:
            descs = agent.register_memory(chosen, name)
        except Exception as error:
            raise RuntimeError(
                f"nixl could not register {sum(size for _, size, *_ in chosen) / 1e9:.2f} GB of {name} "
                f"for KV ({error}): no transfer would succeed. {remedy()}"
            ) from error
        if not descs:
            return []
        registered.append(descs)
    return registered


def device_of(memory_type: str, gpu_id: int) -> int:
    """Device id that a region of this type is registered and addressed with."""
    return gpu_id if memory_type == "VRAM" else 0


def pack_memory_types(kv_args: "KVArgs") -> bytes:
    """The registration's field: one letter a pointer."""
    return b"".join(_LETTER_OF_TYPE[name] for name in _types_of(kv_args))


def memory_types_field(msg: list[bytes], index: int) -> bytes:
    """The field of a registration; empty in one of a decode node that does not send it."""
    return msg[index] if len(msg) > index else b""


def common_memory_type(field: bytes) -> str:
    """The one type of all pointers of a decode node, which one descriptor list can hold.

    Raises:
        ValueError: pointers of different types, or an unknown letter. Called where one
            request fails by it, not the node.
    """
    letters = set(field or b"V")
    if len(letters) != 1 or not letters <= _TYPE_OF_LETTER.keys():
        raise ValueError(
            f"nixl: a decode node registered latent KV of memory types {field!r}; all "
            "pointers of a node must have one known type."
        )
    return _TYPE_OF_LETTER[letters.pop()]


def refuse_prefill_without_memory_types(receiver: "NixlKVReceiver") -> bool:
    """Fail the receiver's request where its prefill node would write to device memory only.

    Asked once for each prefill node and life of it; never where all pointers are device
    memory.

    Returns:
        Whether the request was refused.
    """
    manager = receiver.kv_mgr
    if set(_types_of(manager.kv_args)) == {"VRAM"}:
        return False
    error = _why_refused(receiver)
    if error is None:
        return False
    logger.error(error)
    manager.record_failure(receiver.bootstrap_room, error)
    receiver.bootstrap_infos = None
    receiver.conclude_state = KVPoll.Failed
    manager.update_status(receiver.bootstrap_room, KVPoll.Failed)
    return True


def _why_refused(receiver: "NixlKVReceiver") -> Optional[str]:
    node = receiver.prefill_info  # forgotten when the prefill node fails
    if getattr(node, "takes_kv_memory_types", False):
        return None
    address = receiver.bootstrap_addr
    try:
        status = requests.get(f"http://{address}{ROUTE}", timeout=5).status_code
    except requests.RequestException as error:
        return f"Prefill node {address} did not say whether it can send to host memory: {error}"
    if status == 200:
        node.takes_kv_memory_types = True
        return None
    return (
        f"Prefill node {address} is refused: its nixl backend sends latent KV to device memory "
        "only, but --enable-decode-nsa-kv-offload keeps it in host memory. Apply the same "
        "patches to the prefill node, or pass --disaggregation-transfer-backend mooncake."
    )


def _types_of(kv_args: "KVArgs") -> list[str]:
    return getattr(kv_args, "kv_memory_types", None) or ["VRAM"] * len(kv_args.kv_data_ptrs)
