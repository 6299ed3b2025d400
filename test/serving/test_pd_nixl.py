"""A decode node with offloading behind a prefill node over nixl on loopback.

On a CPU every address can be described as either memory type, so the types that the nodes asked for are compared with the
addresses; equal tokens alone would not show a wrong one.
"""

import json

import pytest
from harness import offload, pd, pd_recorder
from harness.scheduler import InprocScheduler
from harness.server import ServerError

pytestmark = pytest.mark.skipif(pd.missing("nixl") is not None, reason=str(pd.missing("nixl")))

NEW_TOKENS = 16
LENGTHS = (1, 63, 64, 129, 300, 450, 90, 640)
ARGS = ["--kv-cache-dtype", "bfloat16", "--nsa-decode-backend", "flashmla_sparse", "--sleep-on-idle"]


def start(tiny_model, folder, **more):
    config = offload.offload_args()["decode_nsa_kv_offload_config"]
    decode_args = ["--enable-decode-nsa-kv-offload", "--decode-nsa-kv-offload-config", config]
    return pd.Pair(
        tiny_model,
        folder,
        "nixl",
        args=ARGS,
        prefill_args=["--disable-radix-cache"],
        decode_args=decode_args,
        env=pd_recorder.install(folder / "record"),
        **more,
    )


def of_type(regions, kind):
    """Regions that lie within the ranges ``kind``."""
    return [region for region in regions if any(first <= region[0] < first + size for first, size in kind)]


def test_tokens_and_memory_types(tiny_model, tmp_path):
    prompts = offload.prompts(LENGTHS, seed=7)
    with start(tiny_model, tmp_path, stock_prefill=False) as pair:
        first = pair.generate(prompts[-1], 4)["output_ids"]
        outputs = [answer["output_ids"] for answer in pair.generate_all(prompts, NEW_TOKENS)]
        assert pair.decode.healthy(), pair.decode.log_tail()
    with InprocScheduler(tiny_model, **offload.server_args()) as engine:
        expected = engine.run(prompts, NEW_TOKENS)
    equal = [a == b for a, b in zip([first, *outputs], [expected[-1][:4], *expected])]
    print(f"{sum(equal)} of {len(equal)} equal")
    assert all(equal), [i for i, same in enumerate(equal) if not same]
    check_registered(tmp_path / "record")
    check_described(tmp_path / "record")


def check_registered(record):
    (places,) = pd_recorder.read(record, "places")
    registered = [(kind, regions) for call, kind, regions in places["nixl"] if call == "register_memory"]
    dram = [region for kind, regions in registered if kind == "DRAM" for region in regions]
    vram = [region for kind, regions in registered if kind == "VRAM" for region in regions]
    assert [region[:2] for region in of_type(dram, places["host"])] == places["host"]
    assert {region[2] for region in of_type(dram, places["host"])} == {0}
    assert [region[:2] for region in vram] == places["index_keys"]
    assert not of_type(dram + vram, places["windows"])


def check_described(record):
    (places,) = pd_recorder.read(record, "places")
    sent = pd_recorder.read(record, "sent")
    assert {transfer["latent"] for transfer in sent} == {True, False}
    for transfer in sent:
        (_, source, _), (_, target, regions) = transfer["nixl"]
        assert source == "VRAM"
        assert target == ("DRAM" if transfer["latent"] else "VRAM")
        kind = places["host" if transfer["latent"] else "index_keys"]
        assert of_type(regions, kind) == regions
        assert not of_type(regions, places["windows"])
    latent = [transfer for transfer in sent if transfer["latent"]]
    assert any(not set(t["prefill_pages"]) & set(t["decode_pages"]) for t in latent)


def test_a_stock_prefill_node_is_refused_by_name(tiny_model, tmp_path):
    with start(tiny_model, tmp_path) as pair:
        assert "enable_decode_nsa_kv_offload" not in json.loads(pair.prefill.get("/server_info"))
        place = pair.place()
        for _ in range(2):
            with pytest.raises(ServerError, match=f"Prefill node 127.0.0.1:{pair.bootstrap_port} is refused"):
                pair.decode.generate([5, 6, 7], 4, **{**place, **pair.place()})
        assert pair.decode.healthy(), pair.decode.log_tail()
    assert not pd_recorder.read(tmp_path / "record", "sent")
