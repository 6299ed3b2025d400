"""Draws the committed measurements of a GPU beside each other.

    pip install -r benchmark/kv_offload/requirements-plot.txt
    python benchmark/kv_offload/plot.py benchmark/kv_offload/results/h200          # writes an svg beside each of the data
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

COLORS = {"ours": "#1b6ca8", "ours_pinned": "#7fb2d6", "hisparse": "#d1495b", "gather_sorted": "#8d99ae", "copy": "#cfd3dc", "dense": "#555555"}
LABELS = {"ours": "offloading", "ours_pinned": "offloading, pinned host memory", "gather_sorted": "sorted rows alone", "copy": "one copy of the bytes", "dense": "flag off", "hisparse": "HiSparse"}


def grouped(axis, groups: list, impls: list, values: dict, unit: str) -> None:
    """Bars of ``values[group, impl]``, a cluster a group, the value on top."""
    width = 0.8 / len(impls)
    for i, impl in enumerate(impls):
        places = [g + (i - (len(impls) - 1) / 2) * width for g in range(len(groups))]
        heights = [values.get((group, impl), 0) for group in groups]
        bars = axis.bar(places, heights, width, color=COLORS[impl], label=LABELS.get(impl, impl))
        axis.bar_label(bars, [f"{h:.3g}" if 0 < h < 1000 else f"{h:.0f}" if h else "" for h in heights], fontsize=7)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.set_ylabel(unit)
    axis.spines[["top", "right"]].set_visible(False)


def swap_layer(rows: list, out: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(16, 4), width_ratios=[2, 5, 5], layout="constrained")
    rows = [r for r in rows if r["placement"] == "pages" and r["batch"] * r["positions"] == r["pool_rows"] and r["window"] == 4096 and r["positions"] <= 32768]
    rows = [r for r in rows if r.get("queries", 1) == 1]
    # Each on its own kind of memory, and ours on the other too.
    kinds = {"hisparse": "pinned", "copy": "pinned"}
    rows = [{**r, "impl": "ours_pinned"} for r in rows if (r["impl"], r["memory"]) == ("ours", "pinned")] + [
        r for r in rows if r["memory"] == kinds.get(r["impl"], "managed")
    ]
    all_of = ["ours", "ours_pinned", "hisparse", "gather_sorted", "copy"]
    panels = (
        ("nothing misses", ["ours", "hisparse"], lambda r: r["miss_rate"] == 0),
        ("small batches", all_of, lambda r: r["miss_rate"] and r["batch"] < 128),
        ("batch 128", all_of, lambda r: r["miss_rate"] and r["batch"] == 128),
    )
    for axis, (title, impls, chosen) in zip(axes, panels):
        shown = [r for r in rows if chosen(r) and r["impl"] in impls]

        def name(r) -> str:
            return f"batch {r['batch']}\n{r['row_bytes']} B, {r['miss_rate']:.0%}"

        grouped(axis, list(dict.fromkeys(map(name, shown))), impls, {(name(r), r["impl"]): r["us"] for r in shown}, "us a layer")
        axis.set_title(title, fontsize=10)
    axes[-1].legend(fontsize=8, frameon=False)
    figure.suptitle(f"One layer's swap, first touch, {rows[0]['gpu']}: top-k 2048, window 4096, by share of misses", fontsize=11)
    figure.savefig(out)


def decode_step(rows: list, out: Path) -> None:
    impls = [impl for impl in ("dense", "ours", "ours_pinned", "hisparse") if any(r["impl"] == impl for r in rows)]
    groups = list(dict.fromkeys(f"batch {r['batch']}\n{r['replayed_miss_rate']:.0%} misses" for r in rows))
    values = {(f"batch {r['batch']}\n{r['replayed_miss_rate']:.0%} misses", r["impl"]): r["step_ms"] for r in rows}
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    grouped(axis, groups, impls, values, "ms a step")
    axis.legend(fontsize=8, frameon=False)
    first = rows[0]
    axis.set_title(
        f"Decode step, {first['gpu']}: {first['layers']} layers, {first['context'] // 1024}K, {first['kv_dtype']}, replayed top-k",
        fontsize=11,
    )
    figure.savefig(out)


def capacity(rows: list, out: Path) -> None:
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    figure, axes = plt.subplots(1, 1 + len(contexts), figsize=(14, 4), width_ratios=[2] + [4] * len(contexts), layout="constrained")
    impls = ["dense", "hisparse", "ours"]
    fit = {(f"{row['context'] // 1024}K", row["impl"]): row["requests_that_fit"] for row in rows}
    grouped(axes[0], [f"{context // 1024}K" for context in contexts], impls, fit, f"requests in {rows[0]['budget_gb']:g} GB")
    for context, axis in zip(contexts, axes[1:]):
        groups, values = set(), {}
        for rate in {row["replayed_miss_rate"] for row in rows}:
            for row in rows:
                # With the flag off there are no copies, so one rate stands for all.
                if row["context"] == context and (row["replayed_miss_rate"] == rate or row["impl"] == "dense"):
                    name = f"batch {row['batch']}\n{rate:.1%} misses"
                    groups.add((rate, row["batch"], name))
                    values[name, row["impl"]] = row["tokens_per_s"] / 1000
        grouped(axis, [name for *_, name in sorted(groups)], impls, values, "1000 tokens a second")
        axis.tick_params(axis="x", labelsize=7)
        axis.set_title(f"{context // 1024}K", fontsize=10)
    axes[0].legend(fontsize=8, frameon=False)
    first = rows[0]
    text = f"{first['layers']} layers, {first['kv_dtype']}, window {first['window']}, replayed top-k"
    figure.suptitle(f"The same device bytes, {first['gpu']}: {text}", fontsize=11)
    figure.savefig(out)


def turnover(rows: list, out: Path) -> None:
    impls = [impl for impl in ("dense", "ours", "ours_pinned", "hisparse") if any(r["impl"] == impl for r in rows)]
    groups = [f"{context:,} tokens" for context in dict.fromkeys(r["context"] for r in rows)]
    values = {(f"{r['context']:,} tokens", r["impl"]): r["tokens_per_s"] / 1000 for r in rows}
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    grouped(axis, groups, impls, values, "1000 tokens a second")
    axis.legend(fontsize=8, frameon=False)
    first = rows[0]
    text = f"{first['layers']} layers, {first['kv_dtype']}, {first['outstanding']} requests outstanding, 16 to 96 tokens each"
    axis.set_title(f"Turnover, {first['gpu']}: {text}", fontsize=11)
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the data of one GPU")
    folder = parser.parse_args().folder
    plt.rcParams["svg.hashsalt"] = "kv_offload"  # the same data give the same file, but for its date
    for draw in (swap_layer, decode_step, capacity, turnover):
        data = folder / f"{draw.__name__}.json"
        draw(json.loads(data.read_text()), data.with_suffix(".svg"))


if __name__ == "__main__":
    main()
