"""Modelled device seconds of choices that know the flash, against top-k, at equal perplexity on test text.

`python -m benchmarks.flash_selection [--models …] [--devices …] [--orders …] [--groups …] [--slots …]
[--blocks N]`. The inputs of all matrices of the MLP are pruned. There are as many units as the model has, each of the
size that it has in a 7B (hidden 4096, inner 11008) in int4; each layer keeps a share of them in an LRU cache that
begins empty, or none. Reads are the runtime's planner's, seconds the device's.
`top-k` collapses reads over the gap, of four, that takes least on validation text; `use_read_units` has the same reads
and computes with all they bring; `greedy` takes contiguous chunks by importance over seconds, after the description of
Neuron Chunking (2511.18692); `flash` is the product's selector with one density for all layers; `by loss` the same with
the densities of `density_allocation=greedy`, from which prices per layer and family follow. The order
`own` is made for this selection (_flash_orders.py). A curve has one point per density; between points milliseconds are
linear in log perplexity, and all are held to top-k's perplexity at two densities. The last line has `rows` with
milliseconds of reads, `token_ms` of requests, each of which reads while it computes and copies; median and worst gains
over top-k and over greedy chunks of `flash`, of `by loss` and of `use_read_units`, and the same of requests (`_token`).
"""

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.cases import WITH_MIXTURES
from benchmarks.shared.flash_curves import Curve, TopK, flash_curve, greedy_curve, topk_curves
from benchmarks.shared.flash_orders import ORDERS, structural
from benchmarks.shared.flash_setting import Setting, known_of
from benchmarks.shared.report import finish, show
from coldpress.compiler.profiles import load_device

METHODS: Mapping[str, Callable[[Setting], Curve]] = {
    "greedy": greedy_curve,
    "flash": lambda setting: flash_curve(setting, by_loss=False),
    "by loss": lambda setting: flash_curve(setting, by_loss=True),
}
EQUAL_TO = (0.5, 0.3)
"""Densities of top-k whose perplexity the others are held to."""


def ms_at(curve: Curve, ppl: float, what: str) -> float:
    """Milliseconds where a curve has that perplexity; NaN outside of it."""
    points = sorted((math.log(row["ppl"]), row[what]) for row in curve)
    x, y = zip(*points, strict=True)
    return float(np.interp(math.log(ppl), x, y)) if x[0] <= math.log(ppl) <= x[-1] else math.nan


def compared(setting: Setting, masks: TopK, labels: dict[str, Any], methods: Sequence[str]) -> list[dict[str, Any]]:
    """A row per perplexity: milliseconds of every method, and of a dense run in the same DRAM."""
    curves: dict[str, Curve] = {}
    curves["top-k"], curves["use_read_units"] = topk_curves(setting, masks)
    curves |= {name: METHODS[name](setting) for name in methods}
    print(json.dumps(labels | {"curves": curves}), flush=True)
    rows: list[dict[str, Any]] = []
    for density in EQUAL_TO:
        ppl = masks.ppl[density]
        row = labels | {"density": density, "ppl": ppl, "dense_token_ms": setting.dense_ms}
        row |= {name: ms_at(curve, ppl, "ms") for name, curve in curves.items()}
        rows.append(row | {"token_ms": {name: ms_at(curve, ppl, "token_ms") for name, curve in curves.items()}})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def rows_of(arguments: argparse.Namespace, name: str, folder: Path) -> list[dict[str, Any]]:
    """All cases of a model."""
    known = known_of(name, folder, arguments.blocks)
    masks = TopK(known)
    devices = [load_device(Path("profiles/devices") / f"{device}.yaml") for device in arguments.devices]
    rows: list[dict[str, Any]] = []
    for device, groups, order in itertools.product(devices, arguments.groups, arguments.orders):
        if groups > 1 and order != "structural":
            continue  # a group has one order for all its layers, and nothing else is compared here
        plain = Setting(known, device, groups, {})
        plain = dataclasses.replace(plain, orders=structural(plain))
        setting = dataclasses.replace(plain, orders=ORDERS[order](plain))
        for slots in arguments.slots:
            labels = {"model": name, "device": device.name, "groups": groups, "order": order, "slots": slots}
            rows += compared(dataclasses.replace(setting, slots=slots), masks, labels, arguments.methods)
    return rows


def gains(rows: list[dict[str, Any]], over: str, ours: str) -> list[float]:
    """Seconds of a method over ours, where both curves reach the perplexity."""
    found = (row[over] / row[ours] for row in rows if over in row and ours in row)
    return [gain for gain in found if not math.isnan(gain)]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the last line; `_token`: of whole requests, not of their reads alone."""
    found: dict[str, Any] = {"rows": rows}
    whole = [row | row["token_ms"] for row in rows]
    for ours, suffix in (("use_read_units", "_use_read_units"), ("flash", ""), ("by loss", "_by_loss")):
        for over in ("top-k", "greedy"):
            for measured, unit in ((rows, ""), (whole, "_token")):
                gained = gains(measured, over, ours)
                name = f"gain_over_{over.replace('-', '')}{suffix}{unit}"
                found |= {f"median_{name}": statistics.median(gained) if gained else None}
                found |= {f"worst_{name}": min(gained, default=None), f"num_{name}": len(gained)}
    return found


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["prose7m", "tinystories656k", "stories260k"], choices=list(WITH_MIXTURES)
    )
    parser.add_argument("--devices", nargs="+", default=["pixel6", "infinix-zero30"])
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=list(ORDERS))
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 4])
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="beside top-k; by loss takes longest"
    )
    parser.add_argument(
        "--slots", nargs="+", type=float, default=[0.0, 1 / 3], help="shares of the units that an LRU cache keeps"
    )
    parser.add_argument("--blocks", type=int, default=4, help="of 256 tokens of test text")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(arguments, name, Path(folder))
    names = ["top-k", "use_read_units", *arguments.methods]
    columns = ["model", "device", "groups", "order", "slots", "ppl", *names]
    show("ms of reads a token at equal perplexity", columns, [[row[name] for name in columns] for row in rows])
    finish(summary(rows))


if __name__ == "__main__":
    main()
