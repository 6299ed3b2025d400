"""Torch versions of the kernels of ``sglang.jit_kernel.triton.nsa_kv_offload``, a whole batch at a time.

Same signatures and results; see there for what the arguments mean.
"""

import torch


def resolve_topk(
    topk, batch_windows, seq_lens, ring_begin, offset_of_position, touched, counters, lru_slots, ring_slots
):
    wanted = (topk >= 0) & (batch_windows >= 0)[:, None]
    owner = batch_windows.clamp_min(0).long()
    first_in_ring = torch.maximum(ring_begin[owner].long(), seq_lens.long() - ring_slots)[:, None]
    in_ring = wanted & (topk >= first_in_ring)
    in_lru = wanted & ~in_ring
    held = offset_of_position[owner[:, None], torch.where(in_lru, topk, 0).long()].int()
    hit, miss = in_lru & (held >= 0), in_lru & (held < 0)
    touched[owner[:, None].expand_as(topk)[hit], held[hit].long()] = 1

    offsets = torch.where(in_ring, lru_slots + topk % ring_slots, torch.where(hit, held, -1))
    rank = torch.where(miss, miss.cumsum(1) - 1, -1).int()
    positions = torch.full_like(topk, -1)
    positions[miss.nonzero()[:, 0], rank[miss].long()] = topk[miss]
    counters += torch.stack([hit.sum(), in_ring.sum(), miss.sum()])
    return offsets.int(), rank, positions, miss.sum(1).int()


def pick_victims(batch_windows, miss_count, lru_order, touched, k):
    owner = batch_windows.clamp_min(0).long()
    order = lru_order[owner]
    free = (touched[owner].gather(1, order.long()) == 0) & (batch_windows >= 0)[:, None]
    rank = free.cumsum(1) - 1
    chosen = free & (rank < miss_count[:, None])
    victims = torch.full((len(miss_count), k), -1, dtype=torch.int32, device=lru_order.device)
    victims[chosen.nonzero()[:, 0], rank[chosen]] = order[chosen].int()
    return victims


def lru_post_process(
    batch_windows, miss_count, miss_positions, victim_offsets, lru_order, touched, position_at_offset, offset_of_position
):
    real = batch_windows >= 0
    windows, count = batch_windows[real].long(), miss_count[real].long()[:, None]
    loaded = torch.arange(victim_offsets.shape[1], device=windows.device) < count
    window = windows[:, None].expand_as(loaded)[loaded]
    victim, new = victim_offsets[real][loaded].long(), miss_positions[real][loaded].long()
    old = position_at_offset[window, victim].long()
    forget = (old >= 0) & (offset_of_position[window, old.clamp_min(0)] == victim)
    offset_of_position[window[forget], old[forget]] = -1
    position_at_offset[window, victim] = new.int()
    offset_of_position[window, new] = victim.short()

    order = lru_order[windows]
    used = touched[windows].gather(1, order.long()) != 0
    free_rank, used_rank = (~used).cumsum(1) - 1, used.cumsum(1) - 1
    kept_place = torch.where(free_rank < count, order.shape[1] - count + free_rank, free_rank - count)
    place = torch.where(used, (~used).sum(1, keepdim=True) - count + used_rank, kept_place)
    lru_order[windows] = torch.empty_like(order).scatter_(1, place, order)
    touched[windows] = 0


def build_gpu_page_table(
    topk, batch_windows, window_offsets, miss_rank, victim_offsets, first_window_slot, window_slots
):
    base = (first_window_slot + batch_windows.long() * window_slots)[:, None]
    victim = victim_offsets.long().gather(1, miss_rank.clamp_min(0).long())
    offset = torch.where(miss_rank >= 0, victim, window_offsets.long())
    unresolved = torch.where(batch_windows < 0, 0, -1)[:, None]
    table = torch.where(offset >= 0, base + offset, torch.where(topk >= 0, unresolved, -1))
    return table.int(), torch.where(victim_offsets >= 0, base + victim_offsets, -1)


def map_seq_positions_to_host_slots(positions, batch_rows, req_to_token):
    known = positions >= 0
    slots = req_to_token[batch_rows.long()[:, None], torch.where(known, positions, 0).long()]
    return torch.where(known, slots, -1).long()


def install() -> None:
    """Put these in place of the Triton launches; does nothing where SGLang has no such kernels.

    ``__wrapped__`` of each is the launch it stands for.
    """
    try:
        from sglang.jit_kernel.triton import nsa_kv_offload as kernels
    except ModuleNotFoundError:
        return
    from sgl_cpu_ref.patching import replace_everywhere

    for new in (
        resolve_topk,
        pick_victims,
        lru_post_process,
        build_gpu_page_table,
        map_seq_positions_to_host_slots,
    ):
        new.__wrapped__ = getattr(kernels, new.__name__)
        replace_everywhere(kernels.__name__, new.__name__, new)
