"""Device and host memory of decode KV offloading: all that grows with windows or tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

from sglang.jit_kernel.nsa_kv_offload import MissQueue
from sglang.srt.arg_groups.nsa_kv_offload_hook import FLAG
from sglang.srt.configs.model_config import get_nsa_index_topk
from sglang.srt.mem_cache.sparsity.nsa_offload.config import (
    CONFIG_FLAG,
    NSAKVOffloadConfig,
    queries_per_step,
)
from sglang.srt.mem_cache.sparsity.nsa_offload.host_pool import (
    NSAKVOnlyTokenToKVPoolHost,
    check_host_memory,
)
from sglang.srt.mem_cache.sparsity.nsa_offload.lru_cache import LRUCacheState
from sglang.srt.mem_cache.sparsity.nsa_offload.retraction import retraction_bytes
from sglang.srt.model_executor.pool_configurator import (
    MemoryPoolConfig,
    MemoryPoolConfigurator,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Derived batches above this gain nothing: one decode step then moves gigabytes.
MAX_DERIVED_REQUESTS = 256
# A server's first request: its prompt, its answer and a page that SGLang keeps free.
MIN_TOKENS = 128
# Of the index key of one token and layer, and of a staging map entry.
INDEX_KEY_BYTES = 128 + 4
STAGING_MAP_BYTES_PER_PAGE = 4
# A layer's page table; SGLang's padding of a batch is a few rows more.
PAGE_TABLE_BYTES_PER_ENTRY = 4
# The loader of these models takes a checkpoint with exactly one multi-token-prediction layer.
NEXTN_LAYERS = 1
# What limits the number of logical slots.
DEVICE_MEMORY = "device_memory"
HOST_MEMORY = "host_memory"
MAX_TOTAL_TOKENS = "max_total_tokens"


@dataclass(frozen=True)
class OffloadSizes:
    """Counts behind the pools of one rank; slots are rows of ``row_bytes`` in every layer.

    Attributes:
        num_windows: requests that can decode at once, and one spare.
        window_slots: device slots of one window (LRU part and ring).
        lru_slots: the LRU part.
        staging_slots: device slots for prompts being prefilled; 0 on a decode node.
        num_layers: layers of this rank.
        row_bytes: bytes of one row, 656 or 1152.
        page_size: slots a page, 64.
        top_k: entries of a query's top-k.
        queries: query tokens of a request in one step: 1, or a verify step's drafts and the
            token before them.
        draft_layers: layers of the draft model, whose rows stay on the device.
        retraction_bytes: host bytes for retracted requests; 0 on a server that prefills.
    """

    num_windows: int
    window_slots: int
    lru_slots: int
    staging_slots: int
    num_layers: int
    row_bytes: int
    page_size: int
    top_k: int
    queries: int = 1
    draft_layers: int = 0
    retraction_bytes: int = 0

    @property
    def ring_slots(self) -> int:
        return self.window_slots - self.lru_slots

    @property
    def device_slots(self) -> int:
        """Rows of the device KV buffer: the padding page, the windows, the staging area."""
        return self.page_size + self.num_windows * self.window_slots + self.staging_slots

    @property
    def first_window_slot(self) -> int:
        return self.page_size

    @property
    def first_staging_slot(self) -> int:
        return self.page_size + self.num_windows * self.window_slots

    @property
    def swap_entries(self) -> int:
        """Entries of a request in one layer's swap."""
        return self.top_k * self.queries

    @property
    def window_bytes(self) -> int:
        """Device bytes of one more window, its tables included, all layers."""
        rows = self.window_slots * self.row_bytes * self.num_layers
        tables = LRUCacheState.bytes_per_window(self.num_layers, self.lru_slots)
        entries = (MissQueue.BYTES_PER_ENTRY + PAGE_TABLE_BYTES_PER_ENTRY) * self.swap_entries
        return rows + tables + entries

    @property
    def fixed_bytes(self) -> int:
        """Device bytes that grow with neither windows nor tokens."""
        return (self.page_size + self.staging_slots) * self.row_bytes * self.num_layers

    @property
    def bytes_per_token(self) -> float:
        """Device bytes of one more logical slot: index keys, staging map, queue; all of the draft's."""
        return (
            self._resident_bytes_per_token
            + STAGING_MAP_BYTES_PER_PAGE / self.page_size
            + MissQueue.BYTES_PER_HOST_ROW
        )

    @property
    def _resident_bytes_per_token(self) -> int:
        draft = (self.row_bytes + INDEX_KEY_BYTES) * self.draft_layers
        return INDEX_KEY_BYTES * self.num_layers + draft

    @property
    def host_bytes_per_token(self) -> int:
        return self.row_bytes * self.num_layers

    def saved_bytes(self, num_tokens: int) -> int:
        """Host bytes of one retracted request: rows and index keys of whole pages."""
        pages = -(-num_tokens // self.page_size)
        return pages * self.page_size * self.num_layers * (self.row_bytes + INDEX_KEY_BYTES)

    def device_bytes(self, num_tokens: int) -> int:
        """All device bytes for ``num_tokens`` logical slots."""
        padding = self.page_size * self._resident_bytes_per_token
        return int(
            self.fixed_bytes
            + self.num_windows * self.window_bytes
            + num_tokens * self.bytes_per_token
            + padding
        )


@dataclass
class OffloadPoolConfig(MemoryPoolConfig):
    """SGLang's pool configuration with the sizes behind it, and what limits the slots."""

    offload: Optional[OffloadSizes] = None
    slot_limit: str = DEVICE_MEMORY


class NSAOffloadPoolConfigurator(MemoryPoolConfigurator):
    """Turns device bytes into windows and logical slots.

    Windows and staging are fixed, so neither can run out while serving; what is left goes to
    index keys. ``max_running_requests`` is derived where it is unset: as many requests of
    the full context length as fit.
    """

    def __init__(self, mr: "ModelRunner"):
        args = mr.server_args
        self._server_args = args
        self._config = NSAKVOffloadConfig.from_server_args(args)
        self._page_size = mr.page_size
        self._slot_limit = DEVICE_MEMORY
        self._context_len = mr.model_config.context_len
        # As SGLang shares out the limit of requests: among ranks of DP attention, which --tp-size
        # counts as well, and not among the servers that --dp-size alone makes.
        self._data_ranks = args.dp_size if args.enable_dp_attention else 1
        self._replicas = args.dp_size // self._data_ranks
        self._ranks_on_host = max(1, args.tp_size // args.nnodes)
        queries = queries_per_step(args)
        self._sizes = OffloadSizes(
            num_windows=0,
            window_slots=self._config.window_slots,
            lru_slots=self._config.window_size,
            staging_slots=self._staging_slots(args),
            num_layers=mr.num_effective_layers,
            row_bytes=mr.calculate_mla_kv_cache_dim() * mr.kv_cache_dtype.itemsize,
            page_size=mr.page_size,
            top_k=get_nsa_index_topk(mr.model_config.hf_config),
            queries=queries,
            draft_layers=NEXTN_LAYERS if queries > 1 else 0,
        )

    def _staging_slots(self, args) -> int:
        """Slots for the prefix of the one chunked prompt and for the batch beside it."""
        if args.disaggregation_mode == "decode":
            return 0
        page = self._page_size
        chunk = args.chunked_prefill_size
        if chunk is not None and chunk > 0:
            pages = -(-self._context_len // page) + -(-chunk // page)
        else:
            pages = -(-max(self._context_len, args.max_prefill_tokens) // page)
        pages += 2  # a partial page at each end
        if args.max_total_tokens is not None:
            pages = min(pages, args.max_total_tokens // page + 1)
        return pages * page

    @property
    def sizes(self) -> OffloadSizes:
        """Of this rank; windows are counted once ``fit_slots`` has run."""
        return self._sizes

    @property
    def slot_limit(self) -> str:
        """What limits the logical slots, once ``fit_slots`` has run."""
        return self._slot_limit

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> OffloadPoolConfig:
        slots = self.fit_slots(available_bytes)
        return self.calculate_pool_sizes_from_max_tokens(slots, page_size)

    def fit_slots(self, available_bytes: int) -> int:
        """Count the windows, and return the logical slots that fit beside them: whole pages.

        The configured host memory is a limit; whether the machine has it is not asked.

        Raises:
            ValueError: windows and one page do not fit; names the setting to change.
        """
        sizes, page_size = self._sizes, self._page_size
        least = replace(sizes, num_windows=2).device_bytes(page_size)
        if available_bytes < least:
            staging = "--context-length, --chunked-prefill-size or " if sizes.staging_slots else ""
            raise ValueError(
                f"{FLAG} needs {least / 1e9:.2f} GB of device memory for two windows of "
                f"{sizes.window_slots} slots and {sizes.staging_slots} staging slots, but "
                f"{available_bytes / 1e9:.2f} GB are left. Raise --mem-fraction-static, or "
                f"lower {staging}window_size in {CONFIG_FLAG}."
            )
        num_requests = self._num_requests(available_bytes)
        sizes = replace(sizes, num_windows=num_requests + 1)
        left = available_bytes - sizes.device_bytes(0)
        if left < page_size * sizes.bytes_per_token:
            # One spare window, and index keys for one request of the context.
            one = replace(self._sizes, num_windows=1).device_bytes(self._context_slots)
            fit = int((available_bytes - one) // sizes.window_bytes) * self._data_ranks
            remedy = f"lower it to {fit} or less" if fit > 0 else "raise --mem-fraction-static"
            raise ValueError(
                f"{FLAG}: --max-running-requests {num_requests * self._data_ranks} needs "
                f"{sizes.device_bytes(page_size) / 1e9:.2f} GB of device memory for its windows, "
                f"but {available_bytes / 1e9:.2f} GB are left on a GPU. To leave room for the index "
                f"keys of one request of {self._context_len} tokens, {remedy}, or lower window_size "
                f"in {CONFIG_FLAG}."
            )
        by_index_keys = int(left / sizes.bytes_per_token)
        limit = self._server_args.max_total_tokens
        if limit is not None and limit < by_index_keys:
            # Rounded up: SGLang applies the exact limit to what is returned here.
            by_index_keys = min(by_index_keys, -(-limit // page_size) * page_size)
            self._slot_limit = MAX_TOTAL_TOKENS
        tokens = self._tokens_within_host(by_index_keys, sizes)
        if tokens < by_index_keys:
            self._slot_limit = HOST_MEMORY
        self._sizes = sizes
        return tokens // page_size * page_size

    def calculate_pool_sizes_from_max_tokens(
        self, max_total_num_tokens: int, page_size: int
    ) -> OffloadPoolConfig:
        tokens = max_total_num_tokens // page_size * page_size
        sizes = self._sizes
        host_bytes = (
            NSAKVOnlyTokenToKVPoolHost.rows_for(tokens, page_size)
            * sizes.host_bytes_per_token
        )
        retraction = self.retraction_bytes(tokens, host_bytes)
        check_host_memory(
            host_bytes, self._ranks_on_host, self._host_setting(), retraction, self._replicas
        )
        return OffloadPoolConfig(
            max_total_num_tokens=tokens,
            offload=replace(sizes, retraction_bytes=retraction),
            slot_limit=self._slot_limit,
        )

    def retraction_bytes(self, tokens: int, pool_bytes: int) -> int:
        """Host bytes for retracted requests beside a pool of so many bytes and tokens."""
        if self._server_args.disaggregation_mode != "decode":
            return 0
        request = self._sizes.saved_bytes(min(tokens, self._context_len))
        return retraction_bytes(self._config.retract_size_gb, pool_bytes, request)

    def _num_requests(self, available_bytes: int) -> int:
        args = self._server_args
        if args.max_running_requests is not None:
            return args.max_running_requests // self._data_ranks
        per_request = (
            self._sizes.window_bytes + self._context_len * self._sizes.bytes_per_token
        )
        free = available_bytes - self._sizes.device_bytes(0) - self._sizes.window_bytes
        derived = max(1, min(MAX_DERIVED_REQUESTS, int(free / per_request)))
        # The scheduler resolves its limit from the argument after the pools are sized.
        args.max_running_requests = derived * self._data_ranks
        logger.info(
            "%s: --max-running-requests is unset; derived %d from device memory, each with a "
            "window and index keys for %d tokens.",
            FLAG,
            args.max_running_requests,
            self._context_len,
        )
        return derived

    def _tokens_within_host(self, by_index_keys: int, sizes: OffloadSizes) -> int:
        config = self._config
        if config.host_size_gb is None:
            return int(by_index_keys * config.host_ratio)
        page = sizes.page_size
        rows = int(config.host_size_gb * 1e9 // sizes.host_bytes_per_token)
        tokens = (rows // page - 1) * page
        if tokens < MIN_TOKENS:
            raise ValueError(
                f"{CONFIG_FLAG}: host_size_gb={config.host_size_gb} holds {max(tokens, 0)} tokens "
                f"of {sizes.host_bytes_per_token} bytes, under {MIN_TOKENS}, which a server needs to "
                f"answer at all; give {self._context_gb(sizes):.6f} for one request of "
                f"{self._context_len} tokens, or more."
            )
        if tokens < min(by_index_keys, self._context_len):
            logger.warning(
                "%s: host_size_gb=%s holds %d tokens, less than one request of --context-length %d; "
                "give %.6f or more for longer ones.",
                CONFIG_FLAG,
                config.host_size_gb,
                tokens,
                self._context_len,
                self._context_gb(sizes),
            )
        return min(by_index_keys, tokens)

    @property
    def _context_slots(self) -> int:
        """Slots of one request of the context length, and a page to grow into."""
        return -(-self._context_len // self._page_size) * self._page_size + self._page_size

    def _context_gb(self, sizes: OffloadSizes) -> float:
        """GB of host memory that one request of the context length needs, rounded up."""
        rows = NSAKVOnlyTokenToKVPoolHost.rows_for(self._context_slots, sizes.page_size)
        return -(-rows * sizes.host_bytes_per_token // 1000) / 1e6

    def _host_setting(self) -> str:
        config = self._config
        if config.host_size_gb is not None:
            return f"{CONFIG_FLAG} host_size_gb={config.host_size_gb}"
        return f"{CONFIG_FLAG} host_ratio={config.host_ratio} (host_size_gb is unset)"
