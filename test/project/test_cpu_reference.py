"""Each torch reference against a slow oracle."""

import math

import pytest
import torch

from sgl_cpu_ref import allocator, hadamard, index_buffer, kv_pool, matmul, mqa_logits, quant, sparse_mla, topk


class Pool:
    page_size = 64
    index_head_dim = 128


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def oracle_topk(scores, k):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    return sorted(order) + [-1] * (k - len(order))


@pytest.mark.parametrize("cols, k", [(5, 8), (8, 8), (200, 8), (200, 64)])
def test_topk_breaks_ties_by_position(cols, k):
    score = torch.randint(-3, 3, (6, cols)).float()  # few distinct values: nearly all ties
    score[0, 0], score[0, 1] = 0.0, -0.0
    lengths = torch.tensor([cols, 1, 0, cols // 2, cols, cols - 1], dtype=torch.int32)
    out = topk.fast_topk_v2(score, lengths, k)
    assert out.dtype == torch.int32
    for row, length in enumerate(lengths.tolist()):
        assert out[row].tolist() == oracle_topk(score[row, :length].tolist(), k)


def test_topk_row_starts_and_batch_invariance():
    score = torch.randn(4, 300)
    starts, lengths = torch.tensor([0, 100, 250, 299]), torch.tensor([300, 90, 50, 1])
    out = topk.fast_topk_v2(score, lengths, 16, starts)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        part = score[row : row + 1, start : start + length]
        assert out[row].tolist() == oracle_topk(part[0].tolist(), 16)
        assert torch.equal(out[row], topk.fast_topk_v2(part.contiguous(), torch.tensor([length]), 16)[0])


def test_topk_transforms():
    score, lengths = torch.randn(3, 50), torch.tensor([50, 3, 20])
    plain = topk.fast_topk_v2(score, lengths, 8)
    table = torch.randperm(1000)[:100].view(2, 50).int()
    fused = topk.fast_topk_transform_fused(score, lengths, table, torch.tensor([0, 1, 3]), 8)
    offset = torch.tensor([0, 50, 100], dtype=torch.int32)
    ragged = topk.fast_topk_transform_ragged_fused(score, lengths, offset, 8)
    for row in range(3):
        for i, position in enumerate(plain[row].tolist()):
            assert fused[row, i] == (table[min(row, 1), position] if position >= 0 else -1)
            assert ragged[row, i] == (position + offset[row] if position >= 0 else -1)


def test_mqa_logits_against_loops_and_batch_invariance():
    q = torch.randn(3, 4, 128).to(quant.FP8)
    k, scale = quant.act_quant(torch.randn(70, 128))
    w = torch.randn(3, 4)
    out = mqa_logits.fp8_mqa_logits(q, (k, scale.squeeze(-1)), w, None, None)
    qd, kd = q.double(), k.double() * scale.double()
    for m in range(3):
        for n in (0, 1, 63, 64, 69):
            want = sum(w[m, h].double() * torch.relu(qd[m, h] @ kd[n]) for h in range(4))
            assert math.isclose(out[m, n], want, rel_tol=1e-4, abs_tol=1e-3)
        alone = mqa_logits.fp8_mqa_logits(q[m : m + 1], (k, scale.squeeze(-1)), w[m : m + 1], None, None)
        assert torch.equal(alone[0], out[m])


def test_paged_mqa_logits_equal_ragged():
    lengths, page = [130, 64, 0, 1], 64
    buf = torch.zeros(12, page * 132, dtype=torch.uint8)
    table = torch.randperm(12).view(4, 3).int()
    q, w = torch.randn(4, 1, 4, 128).to(quant.FP8), torch.randn(4, 4)
    keys = []
    for b, n in enumerate(lengths):
        k, scale = quant.act_quant(torch.randn(n, 128))
        position = torch.arange(n)
        index_buffer.set_k_and_s(Pool, buf, table[b, position // page].long() * page + position % page, k, scale)
        keys.append((k, scale.squeeze(-1)))
    out = mqa_logits.fp8_paged_mqa_logits(
        q, buf.view(12, page, 1, 132), w, torch.tensor(lengths), table, None, 192
    )
    for b, n in enumerate(lengths):
        assert torch.isneginf(out[b, n:]).all()
        if n:
            assert torch.equal(out[b, :n], mqa_logits.mqa_logits(q[b], *keys[b], w[b : b + 1])[0])


@pytest.mark.parametrize("rows", [2, 5, 17, 70])
def test_attention_and_hadamard_are_batch_invariant(rows):
    cache, q = torch.randn(300, 1, 576, dtype=torch.bfloat16), torch.randn(rows, 8, 576, dtype=torch.bfloat16)
    index = torch.stack([torch.randperm(300)[:64] for _ in range(rows)]).int()
    alone = [sparse_mla.sparse_mla(q[t : t + 1], cache, index[t : t + 1], 0.1, 512) for t in range(rows)]
    assert torch.equal(sparse_mla.sparse_mla(q, cache, index, 0.1, 512), torch.cat(alone))
    alone = [hadamard.hadamard_transform(x) for x in q[..., :128].split(1)]
    assert torch.equal(hadamard.hadamard_transform(q[..., :128]), torch.cat(alone))
    k, v, cu = torch.randn(2 * rows, 8, 192), torch.randn(2 * rows, 8, 128), torch.tensor([0, rows, 2 * rows])
    both = sparse_mla.varlen_mha(k, k, v, cu, cu, 0.1)
    for begin in (0, rows):
        part, one = slice(begin, begin + rows), torch.tensor([0, rows])
        assert torch.equal(sparse_mla.varlen_mha(k[part], k[part], v[part], one, one, 0.1), both[part])


def test_linear_fp32_is_batch_invariant():
    x, w = torch.randn(9, 256, dtype=torch.bfloat16), torch.randn(8, 256, dtype=torch.bfloat16)
    out = mqa_logits.linear_fp32(x, w)
    torch.testing.assert_close(out.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-4)
    for row in range(9):
        assert torch.equal(mqa_logits.linear_fp32(x[row : row + 1], w)[0], out[row])


@pytest.mark.parametrize("packed", [False, True])
def test_sparse_mla(packed):
    tokens, heads, k, d_v = 5, 3, 7, 512
    rows = torch.randn(40, 1, 576, dtype=torch.bfloat16)
    cache = rows
    if packed:
        cache = torch.cat(quant.quantize_k_cache_separate(rows[..., :512], rows[..., 512:]), -1)
        rows = quant.dequantize_rows(cache)
    q = torch.randn(tokens, heads, 576, dtype=torch.bfloat16)
    index = torch.stack([torch.randperm(40)[:k] for _ in range(tokens)]).int()
    index[1, 3:] = -1
    index[2] = -1
    out = sparse_mla.sparse_mla(q, cache, index, 0.1, d_v)
    for t in range(tokens):
        chosen = [i for i in index[t].tolist() if i >= 0]
        if not chosen:
            assert not out[t].any()
            continue
        kv = rows[chosen, 0].double()
        want = torch.softmax(q[t].double() @ kv.T * 0.1, -1) @ kv[:, :d_v]
        torch.testing.assert_close(out[t].double(), want, rtol=2e-2, atol=2e-2)
        assert torch.equal(sparse_mla.sparse_mla(q[t : t + 1], cache, index[t : t + 1], 0.1, d_v)[0], out[t])


def test_sparse_mla_ignores_slot_zero_behind_holes():
    rows = torch.randn(4, 1, 576, dtype=torch.bfloat16)
    q, index = torch.randn(1, 2, 576, dtype=torch.bfloat16), torch.tensor([[2, -1, 3]])
    want = sparse_mla.sparse_mla(q, rows, index, 0.1, 512)
    rows[0] = float("nan")
    assert torch.equal(sparse_mla.sparse_mla(q, rows, index, 0.1, 512), want)


def test_varlen_mha_is_causal():
    q, k, v = torch.randn(5, 2, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 4)
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])  # the first has a prefix of two
    out = sparse_mla.varlen_mha(q, k, v, cu_q, cu_k, 0.3)
    for query, keys in ((0, slice(0, 3)), (1, slice(0, 4)), (2, slice(4, 5)), (4, slice(4, 7))):
        for h in range(2):
            p = torch.softmax(k[keys, h] @ q[query, h] * 0.3, -1)
            torch.testing.assert_close(out[query, h], p @ v[keys, h])


def test_act_quant_scales():
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    x[0, :128] = 0
    for fmt in (None, "ue8m0"):
        y, scale = quant.act_quant(x, 128, fmt)
        back = y.float().unflatten(-1, (2, 128)) * scale.unsqueeze(-1)
        torch.testing.assert_close(back.flatten(-2), x.float(), rtol=0.07, atol=0.02)
        if fmt:
            assert torch.equal(scale, torch.exp2(torch.log2(scale).round()))


def test_packed_rows_keep_rope_bits_and_gather():
    k = torch.randn(6, 576, dtype=torch.bfloat16)
    nope, rope = quant.quantize_k_cache_separate(k[:, :512], k[:, 512:])
    assert nope.shape == (6, 1, 528) and rope.shape == (6, 1, 128)
    packed = torch.cat([nope, rope], -1)
    slots = torch.tensor([4, 0, 4])
    out = quant.dequantize_k_cache_paged(packed, slots)
    assert torch.equal(out[:, 0, 512:], k[slots, 512:])
    torch.testing.assert_close(out[:, 0, :512].float(), k[slots, :512].float(), rtol=0.07, atol=0.02)


def test_bf16_products_are_rounded_once_and_batch_invariant():
    x, weight, bias = (torch.randn(*size, dtype=torch.bfloat16) for size in ((33, 256), (48, 256), (48,)))
    out = matmul.linear(x, weight, bias)
    assert torch.equal(out, (x.double() @ weight.double().T + bias.double()).to(torch.bfloat16))
    assert torch.equal(out, torch.cat([matmul.linear(row, weight, bias) for row in x.split(1)]))
    left, right = torch.randn(4, 33, 128, dtype=torch.bfloat16), torch.randn(4, 128, 64, dtype=torch.bfloat16)
    product = matmul.bmm(left, right)
    assert torch.equal(product, (left.double() @ right.double()).to(torch.bfloat16))
    strided = torch.zeros(33, 4, 64, dtype=torch.bfloat16).transpose(0, 1)
    assert matmul.bmm(left, right, out=strided) is strided and torch.equal(strided, product)


def test_a_weight_that_changes_is_converted_again():
    weight = torch.nn.Parameter(torch.randn(8, 16, dtype=torch.bfloat16), requires_grad=False)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    matmul.linear(x, weight)
    weight.data.fill_(1.0)
    weight.copy_(weight * 2)
    assert torch.equal(matmul.linear(x, weight), (x.double() @ weight.double().T).to(torch.bfloat16))


def test_hadamard_against_definition():
    h = hadamard.hadamard_matrix(16)
    for i in range(16):
        for j in range(16):
            assert h[i, j] == (-1) ** bin(i & j).count("1")
    x = torch.randn(3, 128)
    twice = hadamard.hadamard_transform(hadamard.hadamard_transform(x, 128**-0.5), 128**-0.5)
    torch.testing.assert_close(twice, x)


def test_index_buffer_round_trip_leaves_other_rows():
    buf = torch.randint(0, 256, (6, 64 * 132), dtype=torch.uint8)
    before = buf.clone()
    loc = torch.randperm(6 * 64)[:50]
    k, scale = quant.act_quant(torch.randn(50, 128))
    index_buffer.set_k_and_s(Pool, buf, loc, k, scale)
    keys, scales = index_buffer.split_pages(buf, 64, 128)
    old_keys, old_scales = index_buffer.split_pages(before, 64, 128)
    written = dict(zip(loc.tolist(), range(50)))
    for slot in range(6 * 64):
        page, offset = divmod(slot, 64)
        if slot in written:
            assert torch.equal(keys[page, offset], k[written[slot]].view(torch.uint8))
            assert torch.equal(scales[page, offset].view(torch.float32), scale[written[slot]])
        else:
            assert torch.equal(keys[page, offset], old_keys[page, offset])
            assert torch.equal(scales[page, offset], old_scales[page, offset])
    pages = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
    got_k, got_s = index_buffer.get_k_and_s(Pool, buf, pages, torch.tensor([70, 64]), 134, 70)
    want = [(3, i) for i in range(64)] + [(1, i) for i in range(6)] + [(5, i) for i in range(64)]
    assert torch.equal(got_k, torch.stack([keys[p, o] for p, o in want]))
    assert torch.equal(got_s, torch.stack([scales[p, o] for p, o in want]))


def test_mla_kv_buffer_round_trip_leaves_other_rows():
    buf = torch.randn(20, 1, 576, dtype=torch.bfloat16)
    before, loc = buf.clone(), torch.tensor([3, 17, 0])
    nope, rope = torch.randn(3, 1, 512, dtype=torch.bfloat16), torch.randn(3, 1, 64, dtype=torch.bfloat16)
    kv_pool.set_mla_kv_buffer(buf, loc, nope, rope)
    assert torch.equal(buf[loc], torch.cat([nope, rope], -1))
    rest = [i for i in range(20) if i not in loc.tolist()]
    assert torch.equal(buf[rest], before[rest])
    got = torch.empty_like(nope), torch.empty_like(rope)
    kv_pool.get_mla_kv_buffer(buf, loc, *got)
    assert torch.equal(got[0], nope) and torch.equal(got[1], rope)


def test_allocator_slots():
    out = torch.full((3 + 70,), -1)
    # One grows inside its page and over it; one starts afresh with a whole page and a part.
    allocator.alloc_extend_kernel[(2,)](
        torch.tensor([62, 0]), torch.tensor([65, 70]), torch.tensor([9 * 64 + 61, -1]), torch.tensor([7, 5, 4]), out, 2, 64
    )
    assert out[:3].tolist() == [9 * 64 + 62, 9 * 64 + 63, 7 * 64]
    assert out[3:].tolist() == [5 * 64 + i for i in range(64)] + [4 * 64 + i for i in range(6)]
    step = torch.full((2,), -1)
    allocator.alloc_decode_kernel[(2,)](
        torch.tensor([65, 66]), torch.tensor([9 * 64 + 63, 7 * 64]), torch.tensor([3]), step, 2, 64
    )
    assert step.tolist() == [3 * 64, 7 * 64 + 1]
