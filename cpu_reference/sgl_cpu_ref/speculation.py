"""The kernels around EAGLE / NextN speculation, for chains: one candidate a step (``--speculative-eagle-topk 1``).

Draft token j of a request follows token j - 1, so the "tree" is a list, and what is accepted is its longest prefix that equals
the target's own choices.
"""

import torch


def build_tree_kernel_efficient(
    parent_list,
    top_scores_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    spec_steps,
    num_verify_tokens,
    tree_mask_mode,
) -> None:
    """Fill ``positions`` int64 [B * N] and the three int64 [B, N] lists of a chain of N tokens a request.

    ``tree_mask`` is left alone: sparse attention reads no mask. Raises ValueError for a tree.
    """
    if topk != 1:
        raise ValueError(f"topk {topk}: only chains have a reference")
    batch, step = seq_lens.numel(), torch.arange(num_verify_tokens)
    positions.copy_((seq_lens[:, None] + step).flatten())
    retrieve_index.copy_(torch.arange(batch * num_verify_tokens).view(batch, -1))
    retrieve_next_token.copy_(torch.where(step + 1 < num_verify_tokens, step + 1, -1).expand(batch, -1))
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    target_predict,
    topk=-1,
):
    """Accept each chain's longest prefix that the target itself chose.

    Args:
        predicts: int32 [B * N], out: the target's token after each accepted one.
        accept_index: int32 [B, N], out: rows of the accepted tokens, the known first one included; -1 behind them.
        accept_token_num: int32 [B], out: how many drafts were accepted.
        candidates, target_predict: int [B, N] tokens fed, and the target's choices after them.

    Returns:
        The first three.
    """
    same = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(1)
    accepted = same.sum(1)
    kept = torch.arange(candidates.shape[1]) <= accepted[:, None]
    rows = torch.arange(candidates.numel()).view_as(candidates)
    accept_index.copy_(torch.where(kept, rows, -1))
    accept_token_num.copy_(accepted)
    predicts.copy_(torch.where(kept, target_predict, 0).flatten())
    return predicts, accept_index, accept_token_num


def assign_extend_cache_locs(
    req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device
) -> torch.Tensor:
    """Slots of the positions [start, end) of each request, one request after the other; int64."""
    pieces = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist())
    return torch.cat([req_to_token[row, start:end] for row, start, end in pieces]).long()


def assign_draft_cache_locs(req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps) -> None:
    """Write to ``out_cache_loc`` the slots of the ``topk * num_steps`` positions behind each request's end."""
    positions = seq_lens[:, None] + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], positions].flatten())


def assign_req_to_token_pool(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size) -> None:
    """Enter slots, one request after the other, at the positions [start, end) of their rows."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def fill_bonus_tokens(accept_tokens, accept_lens, bonus_tokens, num_draft_tokens) -> None:
    """Write each request's last accepted token to ``bonus_tokens`` int32 [B]."""
    rows = torch.arange(accept_lens.numel())
    bonus_tokens.copy_(accept_tokens.view(-1, num_draft_tokens)[rows, accept_lens.long() - 1])


def seqlens_expand(extend_seq_lens, seq_lens, total_len, max_q_len) -> torch.Tensor:
    """Length seen by each of a request's last queries: ``kv - q + 1 .. kv``; int32 [total_len]."""
    pieces = zip(extend_seq_lens.tolist(), seq_lens.tolist())
    return torch.cat([torch.arange(kv - q + 1, kv + 1, dtype=torch.int32) for q, kv in pieces])


def install() -> None:
    """Put the references in place."""
    from sglang.srt.speculative import eagle_utils

    from sgl_cpu_ref.patching import Launchable, replace_everywhere

    # Nothing runs behind the CPU: neither waits nor lifetimes across streams mean anything.
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.record_stream = lambda tensor, stream: None
    # Imported from sgl_kernel where there is a GPU, and not defined here.
    eagle_utils.sgl_build_tree_kernel_efficient = build_tree_kernel_efficient
    v2 = "sglang.srt.speculative.eagle_info_v2"
    replace_everywhere("sglang.srt.speculative.eagle_utils", "verify_tree_greedy_func", verify_tree_greedy)
    replace_everywhere(v2, "assign_extend_cache_locs_func", assign_extend_cache_locs)
    replace_everywhere(v2, "assign_draft_cache_locs_page_size_1", Launchable(assign_draft_cache_locs))
    replace_everywhere(v2, "fill_bonus_tokens", Launchable(fill_bonus_tokens))
    replace_everywhere("sglang.srt.speculative.spec_utils", "assign_req_to_token_pool_func", assign_req_to_token_pool)
    replace_everywhere("sglang.srt.layers.attention.utils", "seqlens_expand_triton", seqlens_expand)
