"""The one configuration of decode KV offloading: parsed once, frozen, checked by name."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Optional

from sglang.jit_kernel.nsa_kv_offload import (
    MAX_SHARED_BYTES,
    MAX_WINDOW_SLOTS,
    swap_shared_bytes,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

CONFIG_FLAG = "--decode-nsa-kv-offload-config"
HOST_MEMORY = ("managed", "pinned")
SLOT_MULTIPLE = 64  # FlashMLA views the device buffer as pages of 64 rows


@dataclass(frozen=True)
class NSAKVOffloadConfig:
    """Settings of ``--decode-nsa-kv-offload-config`` (JSON); sizes are per TP rank.

    Attributes:
        window_size: LRU rows a running request keeps on the device in every layer. At least
            the model's top-k for each query token of a step, whose lists may share nothing; a
            multiple of 64. Default: that, and no less than twice the top-k.
        write_back_ring: newest rows kept on the device outside the LRU until they are on the
            host: at least those of two steps; a multiple of 64.
        host_size_gb: host memory for latent KV in GB (1e9 bytes), in place of ``host_ratio``.
        host_ratio: host rows for each logical slot that index-key memory allows, above 0 and
            at most 1: a row without an index key has no use.
        retract_size_gb: host memory for requests that a decode node retracts, in GB, 0 for none.
            Default: a twentieth of the host pool, and no less than one request of the context.
        host_memory: "managed" or "pinned". Default: managed, which the device reads scattered
            rows of at the link's rate; pinned where a transfer engine registers the rows with a
            network card, or the GPU cannot share managed memory.
    """

    window_size: int
    write_back_ring: int = 64
    host_size_gb: Optional[float] = None
    host_ratio: float = 1.0
    retract_size_gb: Optional[float] = None
    host_memory: Optional[str] = None

    @property
    def window_slots(self) -> int:
        """Device slots of one window: the LRU part and the ring."""
        return self.window_size + self.write_back_ring

    @classmethod
    def from_json(
        cls, text: Optional[str], top_k: int, queries: int = 1
    ) -> "NSAKVOffloadConfig":
        """Parse and check.

        Args:
            text: the JSON object, or None for the defaults.
            top_k: the model's ``index_topk``.
            queries: query tokens of a request in one step.

        Raises:
            ValueError: names the flag, the key, the value and the legal range.
        """
        values = parse_object(text)
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(
                f"{CONFIG_FLAG}: unknown key {unknown[0]!r}; known keys are {known}."
            )
        values.setdefault("window_size", max(2, queries) * top_k)
        why = "the model's top-k"
        if queries > 1:
            why += f" for each of the {queries} tokens that a verify step asks about at once"
        _check_slots("window_size", values["window_size"], queries * top_k, why)
        ring = values.get("write_back_ring", SLOT_MULTIPLE)
        _check_slots("write_back_ring", ring, SLOT_MULTIPLE, "one page")
        _check_positive("host_size_gb", values.get("host_size_gb"))
        _check_positive("host_ratio", values.get("host_ratio"))
        if values.get("retract_size_gb") != 0:
            _check_positive("retract_size_gb", values.get("retract_size_gb"), "0, or ")
        if values.get("host_memory") not in (None, *HOST_MEMORY):
            raise ValueError(
                f"{CONFIG_FLAG}: host_memory={values['host_memory']!r} is neither "
                f"{HOST_MEMORY[0]!r} nor {HOST_MEMORY[1]!r}; give one of them, or leave it out."
            )
        if None not in (values.get("host_size_gb"), values.get("host_ratio")):
            raise ValueError(
                f"{CONFIG_FLAG}: host_size_gb={values['host_size_gb']} and "
                f"host_ratio={values['host_ratio']} both size the host pool; give one of them."
            )
        if values.get("host_ratio") is not None and values["host_ratio"] > 1:
            raise ValueError(
                f"{CONFIG_FLAG}: host_ratio={values['host_ratio']} is above 1; host rows "
                "beyond the index keys on the device could never be used. Give at most 1.0."
            )
        config = cls(**{key: value for key, value in values.items() if value is not None})
        if config.window_slots > MAX_WINDOW_SLOTS:
            raise ValueError(
                f"{CONFIG_FLAG}: window_size + write_back_ring = {config.window_slots} is "
                f"above {MAX_WINDOW_SLOTS}, the range of a 16-bit window offset; lower one of them."
            )
        shared_bytes = swap_shared_bytes(queries * top_k, config.window_size)
        if shared_bytes > MAX_SHARED_BYTES:
            raise ValueError(
                f"{CONFIG_FLAG}: window_size={config.window_size} and a top-k of {top_k} for "
                f"{queries} tokens a step need {shared_bytes} bytes of a thread block's shared "
                f"memory, which has {MAX_SHARED_BYTES}; give fewer draft tokens or a smaller window."
            )
        return config

    @classmethod
    def from_server_args(cls, server_args: "ServerArgs") -> "NSAKVOffloadConfig":
        """The configuration of a server whose model is a DSA model.

        Raises:
            ValueError: as ``from_json``; or its memory does not suit the transfer backend.
        """
        from sglang.srt.configs.model_config import get_nsa_index_topk

        hf_config = server_args.get_model_config().hf_config
        config = cls.from_json(
            server_args.decode_nsa_kv_offload_config,
            get_nsa_index_topk(hf_config),
            queries_per_step(server_args),
        )
        if config.host_memory == "managed" and registers_host_memory(server_args):
            raise ValueError(
                f"{CONFIG_FLAG}: host_memory='managed' cannot be combined with "
                f"--disaggregation-transfer-backend {server_args.disaggregation_transfer_backend}: "
                "it registers the rows with a network card, which does not take managed memory. "
                "Leave host_memory out, or give 'pinned'."
            )
        if config.retract_size_gb is not None and server_args.disaggregation_mode != "decode":
            raise ValueError(
                f"{CONFIG_FLAG}: retract_size_gb={config.retract_size_gb} has no use on a server "
                "that prefills: it computes a retracted request again. Leave it out."
            )
        return config


def registers_host_memory(server_args: "ServerArgs") -> bool:
    """Whether a transfer engine registers the host pool, to receive rows in it."""
    is_decode_node = server_args.disaggregation_mode == "decode"
    return is_decode_node and server_args.disaggregation_transfer_backend != "fake"


def queries_per_step(server_args: "ServerArgs") -> int:
    """Query tokens of a request in one decode step: one, or as many as a verify step has."""
    if server_args.speculative_algorithm is None:
        return 1
    return server_args.speculative_num_draft_tokens


def parse_object(text: Optional[str]) -> dict[str, Any]:
    """The JSON object that configures the flag, unchecked.

    Raises:
        ValueError: it is not one.
    """
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{CONFIG_FLAG}={text!r} is not JSON ({error}); give an object such as "
            '\'{"window_size": 4096, "host_size_gb": 200}\'.'
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{CONFIG_FLAG}={text!r} is not a JSON object; give one such as "
            '\'{"window_size": 4096}\'.'
        )
    return values


def _check_slots(key: str, value: Any, minimum: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{CONFIG_FLAG}: {key}={value!r} must be an integer above 0.")
    if value < minimum:
        raise ValueError(
            f"{CONFIG_FLAG}: {key}={value} is under {minimum}, {why}; give a multiple of "
            f"{SLOT_MULTIPLE} that is at least {minimum}."
        )
    if value % SLOT_MULTIPLE:
        raise ValueError(
            f"{CONFIG_FLAG}: {key}={value} is no multiple of {SLOT_MULTIPLE}; the next legal "
            f"value is {-(-value // SLOT_MULTIPLE) * SLOT_MULTIPLE}."
        )


def _check_positive(key: str, value: Any, also: str = "") -> None:
    if value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"{CONFIG_FLAG}: {key}={value!r} must be {also}a finite number above 0.")
