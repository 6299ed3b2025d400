"""Command line and start-up checks of ``--enable-decode-nsa-kv-offload``."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, Callable, NamedTuple

from sglang.srt.environ import envs

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

FLAG = "--enable-decode-nsa-kv-offload"
# flashmla_kv reads fp8 rows only, flashmla_sparse bf16 rows only; other backends keep their
# own row layout or page table.
_BACKEND_OF_DTYPE = {"bfloat16": "flashmla_sparse", "fp8_e4m3": "flashmla_kv"}
# A prefill node writes latent rows straight into the decode node's host pool.
_TRANSFERS_TO_HOST_MEMORY = ("mooncake", "nixl", "fake")
MAX_SPECULATIVE_STEPS = 4


class Conflict(NamedTuple):
    """A setting that cannot be combined with the flag yet.

    Attributes:
        holds: whether the server arguments have the conflict.
        setting: how the user asked for it.
        reason: why it is refused.
        recipe: what to pass instead.
    """

    holds: Callable[["ServerArgs"], bool]
    setting: str
    reason: str
    recipe: str


def _is_decode_node(args: "ServerArgs") -> bool:
    return args.disaggregation_mode == "decode"


def _speculates(args: "ServerArgs") -> bool:
    return args.speculative_algorithm is not None


CONFLICTS = (
    Conflict(
        lambda a: a.enable_hisparse,
        "--enable-hisparse",
        "both move latent KV to host memory, each with its own slots",
        "pass one of the two",
    ),
    Conflict(
        lambda a: a.disaggregation_mode == "prefill",
        "--disaggregation-mode prefill",
        "a prefill node never decodes, so it has nothing to offload",
        "pass the flag on the decode node only",
    ),
    Conflict(
        lambda a: a.enable_hierarchical_cache,
        "--enable-hierarchical-cache",
        "its host pool mirrors a device pool that holds every token",
        "drop it here; a prefill node of its own may use it",
    ),
    Conflict(
        lambda a: a.enable_lmcache,
        "--enable-lmcache",
        "it reads the latent KV of finished requests from the device",
        "drop --enable-lmcache",
    ),
    Conflict(
        lambda a: _is_decode_node(a)
        and a.disaggregation_transfer_backend not in _TRANSFERS_TO_HOST_MEMORY,
        "--disaggregation-transfer-backend other than mooncake, nixl or fake",
        "it is not known to write to the host memory of a decode node",
        f"choose one of {_TRANSFERS_TO_HOST_MEMORY}",
    ),
    Conflict(
        lambda a: a.disaggregation_decode_enable_offload_kvcache,
        "--disaggregation-decode-enable-offload-kvcache",
        "it copies and frees the same rows on its own schedule",
        "drop --disaggregation-decode-enable-offload-kvcache",
    ),
    Conflict(
        lambda a: not a.disable_radix_cache and not _is_decode_node(a),
        "the radix cache (on by default)",
        "prefill over a matched prefix would need its rows back on the device",
        "pass --disable-radix-cache",
    ),
    Conflict(
        lambda a: a.speculative_algorithm not in (None, "EAGLE"),
        "--speculative-algorithm other than EAGLE or NEXTN",
        "only the draft layer of the model's own checkpoint is covered",
        "pass --speculative-algorithm EAGLE --speculative-eagle-topk 1",
    ),
    Conflict(
        lambda a: _speculates(a) and a.speculative_eagle_topk != 1,
        "--speculative-eagle-topk above 1",
        "accepted rows of a tree would have to move, and latent KV cannot be moved",
        "pass --speculative-eagle-topk 1",
    ),
    Conflict(
        lambda a: _speculates(a) and a.speculative_num_steps > MAX_SPECULATIVE_STEPS,
        f"--speculative-num-steps above {MAX_SPECULATIVE_STEPS}",
        "each step more makes every window one top-k larger",
        f"pass --speculative-num-steps {MAX_SPECULATIVE_STEPS} or less",
    ),
    Conflict(
        lambda a: _speculates(a) and a.speculative_adaptive,
        "--speculative-adaptive",
        "windows and CUDA graphs are made for one number of drafts",
        "drop --speculative-adaptive",
    ),
    Conflict(
        lambda a: _speculates(a) and a.disable_overlap_schedule,
        "--speculative-algorithm without the overlap scheduler (spec v1)",
        "spec v1 allocates and frees slots inside its verify step",
        "drop --disable-overlap-schedule, and leave SGLANG_ENABLE_SPEC_V2=1 (the default)",
    ),
    Conflict(
        lambda a: _speculates(a)
        and _is_decode_node(a)
        and a.disaggregation_transfer_backend == "nixl",
        "--disaggregation-transfer-backend nixl with --speculative-algorithm",
        "one list of descriptors holds one type of memory, and the draft layer's rows are on "
        "the device",
        "choose mooncake or fake",
    ),
    Conflict(
        lambda a: _speculates(a) and a.speculative_draft_model_path != a.model_path,
        "--speculative-draft-model-path",
        "the memory of a draft model is counted as that of the checkpoint's own layer",
        "drop it: SGLang takes the draft layer from --model-path",
    ),
    Conflict(
        lambda a: a.enable_mixed_chunk,
        "--enable-mixed-chunk",
        "it sends decode tokens through the prefill attention",
        "drop --enable-mixed-chunk",
    ),
    Conflict(
        lambda a: a.enable_two_batch_overlap,
        "--enable-two-batch-overlap",
        "it splits a batch over two attention backends",
        "drop --enable-two-batch-overlap",
    ),
    Conflict(
        lambda a: a.enable_torch_compile,
        "--enable-torch-compile",
        "a compiled layer is not known to keep the order of the stream that loads its rows",
        "drop --enable-torch-compile",
    ),
    Conflict(
        lambda a: a.enable_pdmux,
        "--enable-pdmux",
        "it runs prefill and decode on streams of its own",
        "drop --enable-pdmux",
    ),
    Conflict(
        lambda a: a.enable_memory_saver,
        "--enable-memory-saver",
        "windows and tables are not in its regions",
        "drop --enable-memory-saver",
    ),
    Conflict(
        lambda a: a.enable_streaming_session,
        "--enable-streaming-session",
        "a session keeps its row, and so a window, between requests",
        "drop --enable-streaming-session",
    ),
    Conflict(
        lambda a: a.enable_nsa_prefill_context_parallel,
        "--enable-nsa-prefill-context-parallel",
        "ranks hold parts of a prompt, so none could stage it whole",
        "drop --enable-nsa-prefill-context-parallel",
    ),
    Conflict(
        lambda a: a.pp_size > 1,
        "--pp-size above 1",
        "its event loop does not return results to the write-back",
        "use --tp-size",
    ),
)


def add_nsa_kv_offload_args(parser: argparse.ArgumentParser) -> None:
    """Add the two options of the feature to SGLang's server arguments."""
    parser.add_argument(
        FLAG,
        action="store_true",
        help="Keep the latent KV of DeepSeek sparse attention (DSA) models in host memory "
        "during decode, with a window of it on the device. Frees device memory for more "
        "requests at long contexts.",
    )
    parser.add_argument(
        "--decode-nsa-kv-offload-config",
        type=str,
        default=None,
        help="A dictionary in JSON string format for " + FLAG + ". Keys: window_size (device "
        "rows a request and layer; default 2 x top-k, or the top-k of each query token), "
        "write_back_ring, host_size_gb (of one rank; --tp-size ranks take as much each), host_ratio, host_memory. "
        'Example: \'{"window_size": 4096, "host_size_gb": 120}\'',
    )


def apply_nsa_kv_offload_defaults(server_args: "ServerArgs", kv_cache_dtype: str) -> None:
    """Choose the sparse backends that read windows, where the user named none."""
    if not server_args.enable_decode_nsa_kv_offload:
        return
    backend = _BACKEND_OF_DTYPE[kv_cache_dtype]
    server_args.nsa_prefill_backend = server_args.nsa_prefill_backend or backend
    server_args.nsa_decode_backend = server_args.nsa_decode_backend or backend


def validate_nsa_kv_offload(server_args: "ServerArgs") -> None:
    """Refuse what cannot be combined with the flag, before anything is allocated.

    Raises:
        ValueError: names both settings, the reason and the legal recipe.
    """
    if not server_args.enable_decode_nsa_kv_offload:
        if server_args.decode_nsa_kv_offload_config is not None:
            raise ValueError(
                f"--decode-nsa-kv-offload-config has no effect without {FLAG}; pass both."
            )
        return

    for conflict in CONFLICTS:
        if conflict.holds(server_args):
            raise ValueError(
                f"{FLAG} cannot be combined with {conflict.setting}: {conflict.reason}. "
                f"Instead, {conflict.recipe}."
            )
    _check_model(server_args)
    _check_backends(server_args)

    from sglang.srt.mem_cache.sparsity.nsa_offload.config import NSAKVOffloadConfig

    config = NSAKVOffloadConfig.from_server_args(server_args)
    logger.info("%s: %s", FLAG, config)


def _check_model(server_args: "ServerArgs") -> None:
    from sglang.srt.configs.model_config import is_deepseek_nsa, is_deepseek_v4

    hf_config = server_args.get_model_config().hf_config
    if not is_deepseek_nsa(hf_config) or is_deepseek_v4(hf_config):
        raise ValueError(
            f"{FLAG} needs a model with DeepSeek sparse attention (DeepSeek V3.2, GLM-5), "
            f"but --model-path {server_args.model_path} is {hf_config.architectures[0]}."
        )


def _check_backends(server_args: "ServerArgs") -> None:
    if _speculates(server_args) and envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        raise ValueError(
            f"{FLAG} with --speculative-algorithm needs SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0 "
            "(the default): tables change on the stream that prepares a forward, which must be "
            "the one that runs it."
        )
    for phase, backend in zip(("prefill", "decode"), server_args.get_attention_backends()):
        if backend != "nsa":
            raise ValueError(
                f"{FLAG} needs --attention-backend nsa, but got {backend} for {phase}."
            )
    dtype = server_args.kv_cache_dtype
    backend = _BACKEND_OF_DTYPE.get(dtype)
    if backend is None:
        raise ValueError(
            f"{FLAG} needs --kv-cache-dtype in {sorted(_BACKEND_OF_DTYPE)}, but got {dtype}."
        )
    for phase in ("prefill", "decode"):
        chosen = getattr(server_args, f"nsa_{phase}_backend")
        if chosen != backend:
            raise ValueError(
                f"{FLAG} with --kv-cache-dtype {dtype} needs --nsa-{phase}-backend "
                f"{backend}, but got {chosen}."
            )
    if not envs.SGLANG_NSA_FUSE_TOPK.get():
        raise ValueError(
            f"{FLAG} needs SGLANG_NSA_FUSE_TOPK=1 (the default): prefill reads its page "
            "table through the fused top-k."
        )
