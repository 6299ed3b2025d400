"""The references against SGLang's own Triton kernels, run by the Triton interpreter."""

import harness  # noqa: F401  (TRITON_INTERPRET before triton)
import pytest
import torch

triton = pytest.importorskip("triton")

from sgl_cpu_ref import allocator, index_buffer, kv_pool, quant  # noqa: E402
from sgl_cpu_ref.patching import original  # noqa: E402

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret or torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1 and no GPU"
)

NSA = "sglang.srt.layers.attention.nsa"
MEM = "sglang.srt.mem_cache"


class Pool:
    page_size = 64
    index_head_dim = 128
    quant_block_size = 128
    device = "cpu"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_same_fp8(got, want, exact):
    """Equal but for two habits of the interpreter's cast to fp8: ties go away from zero, and a mantissa that rounds up to
    the next power of two loses its carry (31.5 becomes 16). ``exact`` holds the values before the cast."""
    got, want = got.float(), want.float()
    tie = (exact - got).abs() == (exact - want).abs()
    carry = (got.abs() == 2 * want.abs()) & (torch.frexp(got)[0].abs() == 0.5)
    assert ((got == want) | tie | carry).all()
    assert (got == want).float().mean() > 0.8


@pytest.mark.parametrize("rows", [1, 8, 33])
def test_act_quant(rows):
    x = torch.randn(rows, 128, dtype=torch.bfloat16)
    want, want_scale = original(f"{NSA}.triton_kernel", "act_quant")(x, 128, "ue8m0")
    got, scale = quant.act_quant(x, 128, "ue8m0")
    assert torch.equal(scale, want_scale)
    assert_same_fp8(got, want, x.float() / scale)


def test_quantize_k_cache_separate():
    nope, rope = torch.randn(16, 512, dtype=torch.bfloat16), torch.randn(16, 64, dtype=torch.bfloat16)
    want = original(f"{NSA}.quant_k_cache", "quantize_k_cache_separate")(nope, rope)
    got = quant.quantize_k_cache_separate(nope, rope)
    assert [t.shape for t in got] == [t.shape for t in want]
    assert torch.equal(as_bytes(got[1]), as_bytes(want[1]))
    scales = [t[..., 512:].view(torch.float32) for t in (as_bytes(got[0]), as_bytes(want[0]))]
    torch.testing.assert_close(*scales, rtol=1e-6, atol=0)
    values = [as_bytes(t)[:, 0, :512].contiguous().view(quant.FP8) for t in (got[0], want[0])]
    exact = (nope.float().view(16, 4, 128) / scales[0].view(16, 4, 1)).flatten(-2)
    assert_same_fp8(*values, exact)


@pytest.mark.parametrize("rows", [1, 8, 100])
def test_mla_kv_buffer(rows):
    setter = original(f"{MEM}.utils", "set_mla_kv_buffer_triton")
    getter = original(f"{MEM}.utils", "get_mla_kv_buffer_triton")
    want = torch.randn(256, 1, 576, dtype=torch.bfloat16)
    got, loc = want.clone(), torch.randperm(256)[:rows]
    nope, rope = torch.randn(rows, 1, 512, dtype=torch.bfloat16), torch.randn(rows, 1, 64, dtype=torch.bfloat16)
    setter(want, loc, nope, rope)
    kv_pool.set_mla_kv_buffer(got, loc, nope, rope)
    assert torch.equal(got, want)
    out = [torch.empty_like(t) for t in (nope, rope, nope, rope)]
    getter(want, loc, out[0], out[1])
    kv_pool.get_mla_kv_buffer(want, loc, out[2], out[3])
    assert torch.equal(out[0], out[2]) and torch.equal(out[1], out[3])


def test_index_buffer():
    accessor = f"{NSA}.index_buf_accessor"
    want = torch.randint(0, 256, (16, 64 * 132), dtype=torch.uint8)
    got, loc = want.clone(), torch.randperm(16 * 64)[:50]
    k, scale = quant.act_quant(torch.randn(50, 128, dtype=torch.bfloat16))
    original(accessor, "SetKAndS.triton")(Pool, want, loc, k, scale)
    index_buffer.set_k_and_s(Pool, got, loc, k, scale)
    assert torch.equal(got, want)

    pages = torch.randperm(16)[:4].view(2, 2).int()
    lengths = torch.tensor([100, 65])
    want_k, want_s = original(accessor, "GetKAndS.triton")(Pool, want, pages, lengths, 165, 100)
    got_k, got_s = index_buffer.get_k_and_s(Pool, want, pages, lengths, 165, 100)
    assert torch.equal(as_bytes(want_k).view(165, 128), got_k)
    assert torch.equal(as_bytes(want_s).view(165, 4), got_s)
    for name, reference in (("GetK", index_buffer.get_k), ("GetS", index_buffer.get_s)):
        one = original(accessor, f"{name}.triton")(Pool, want, 100, pages[0])
        assert torch.equal(as_bytes(one).view(100, -1), reference(Pool, want, 100, pages[0]))


def test_allocator():
    pre, seq = torch.tensor([0, 70, 128, 64]), torch.tensor([100, 200, 129, 64])
    last = torch.tensor([-1, 64 * 9 + 5, 64 * 12 + 63, 64 * 13 + 63])
    free = torch.arange(20, 40)
    outs = [torch.full((231,), -1, dtype=torch.int64) for _ in range(2)]
    original(f"{MEM}.allocator", "alloc_extend_kernel")[(4,)](pre, seq, last, free, outs[0], 4, 64)
    allocator.alloc_extend_kernel[(4,)](pre, seq, last, free, outs[1], 4, 64)
    assert torch.equal(*outs)

    seq, last = torch.tensor([65, 71, 129]), torch.tensor([64 * 3 + 63, 500, 64 * 5 + 63])
    outs = [torch.full((3,), -1, dtype=torch.int64) for _ in range(2)]
    original(f"{MEM}.allocator", "alloc_decode_kernel")[(3,)](seq, last, free, outs[0], 4, 64)
    allocator.alloc_decode_kernel[(3,)](seq, last, free, outs[1], 4, 64)
    assert torch.equal(*outs)


def test_last_loc():
    table = torch.arange(1024, dtype=torch.int32).view(4, 256)
    rows, lengths = torch.tensor([1, 2]), torch.tensor([10, 0])
    want = original(f"{MEM}.common", "get_last_loc_triton")(table, rows, lengths)
    got = original(f"{MEM}.common", "get_last_loc_torch")(table, rows, lengths)
    assert torch.equal(want.long(), got.long())
