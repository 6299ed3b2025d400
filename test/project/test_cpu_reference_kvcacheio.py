"""The stub's KV transfer functions: mapped rows arrive, unmapped rows and the source stay as they were."""

import pytest
import torch

from sgl_kernel import kvcacheio

LAYERS, PAGE = 3, 4
SRC_ROWS, DST_ROWS, WIDTH = 32, 24, 82
SRC = torch.tensor([8, 9, 10, 11, 28, 29, 30, 31])  # two pages, as the page functions need
DST = torch.tensor([16, 17, 18, 19, 4, 5, 6, 7])


def layers(rows):
    return [torch.randint(0, 256, (rows, 1, WIDTH), dtype=torch.uint8) for _ in range(LAYERS)]


def pointers(tensors):
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


class Case:
    """Source and destination as lists of per-layer row views, whatever their layout."""

    def __init__(self, src, dst, touched=range(LAYERS)):
        self.src, self.dst, self.touched = src, dst, set(touched)
        self.src_before = [t.clone() for t in src]
        self.dst_before = [t.clone() for t in dst]

    def check(self):
        rest = [i for i in range(DST_ROWS) if i not in DST.tolist()]
        for layer in range(len(self.dst)):
            assert torch.equal(self.src[layer], self.src_before[layer])
            assert torch.equal(self.dst[layer][rest], self.dst_before[layer][rest])
            want = self.src[layer][SRC] if layer in self.touched else self.dst_before[layer][DST]
            assert torch.equal(self.dst[layer][DST], want)


def test_per_layer():
    src, dst = layers(SRC_ROWS), layers(DST_ROWS)
    case = Case(src, dst, [1])
    kvcacheio.transfer_kv_per_layer_mla(src[1], dst[1], SRC, DST, item_size=WIDTH)
    case.check()


def test_all_layers_by_address():
    src, dst = layers(SRC_ROWS), layers(DST_ROWS)
    case = Case(src, dst)
    kvcacheio.transfer_kv_all_layer_mla(pointers(src), pointers(dst), SRC, DST, WIDTH, LAYERS)
    case.check()


def test_no_rows_is_legal():
    src, dst = layers(SRC_ROWS), layers(DST_ROWS)
    before = [t.clone() for t in dst]
    none = SRC[:0]
    kvcacheio.transfer_kv_all_layer_mla(pointers(src), pointers(dst), none, none, WIDTH, LAYERS)
    packed = torch.zeros(DST_ROWS, LAYERS, 1, WIDTH, dtype=torch.uint8)
    kvcacheio.transfer_kv_all_layer_mla_lf_pf(pointers(src), packed, none, none, WIDTH, WIDTH * LAYERS, LAYERS)
    assert all(torch.equal(a, b) for a, b in zip(dst, before)) and not packed.any()


def test_layer_first_to_page_first():
    src = layers(SRC_ROWS)
    packed = torch.randint(0, 256, (DST_ROWS, LAYERS, 1, WIDTH), dtype=torch.uint8)
    case = Case(src, [packed[:, i] for i in range(LAYERS)])
    kvcacheio.transfer_kv_all_layer_mla_lf_pf(pointers(src), packed, SRC, DST, WIDTH, WIDTH * LAYERS, LAYERS)
    case.check()


def test_page_first_to_layer_first():
    packed = torch.randint(0, 256, (SRC_ROWS, LAYERS, 1, WIDTH), dtype=torch.uint8)
    dst = layers(DST_ROWS)
    case = Case([packed[:, i] for i in range(LAYERS)], dst, [2])
    kvcacheio.transfer_kv_per_layer_mla_pf_lf(packed, dst[2], SRC, DST, 2, WIDTH, WIDTH * LAYERS)
    case.check()


def test_direct():
    src, dst = layers(SRC_ROWS), layers(DST_ROWS)
    case = Case(src, dst)
    kvcacheio.transfer_kv_direct(src, dst, SRC, DST, PAGE)
    case.check()


def paged(rows):
    """[pages, layers, page, 1, width], and each layer's rows of it."""
    whole = torch.randint(0, 256, (rows // PAGE, LAYERS, PAGE, 1, WIDTH), dtype=torch.uint8)
    return whole


def rows_of(whole):
    return [whole[:, i].reshape(-1, 1, WIDTH) for i in range(LAYERS)]


def test_direct_layer_first_to_page_first():
    src, whole = layers(SRC_ROWS), paged(DST_ROWS)
    case = Case(src, rows_of(whole))
    kvcacheio.transfer_kv_all_layer_direct_lf_pf(src, [whole], SRC, DST, PAGE)
    case.dst = rows_of(whole)  # reshape copied
    case.check()


def test_direct_page_first_to_layer_first():
    whole, dst = paged(SRC_ROWS), layers(DST_ROWS)
    case = Case(rows_of(whole), dst, [0])
    kvcacheio.transfer_kv_per_layer_direct_pf_lf([whole], [dst[0]], SRC, DST, 0, PAGE)
    case.check()


def test_other_functions_refuse():
    with pytest.raises(NotImplementedError, match="transfer_kv_nothing"):
        kvcacheio.transfer_kv_nothing(1)
