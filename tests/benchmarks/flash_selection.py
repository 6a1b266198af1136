"""Modelled device seconds of choices that know the flash, against top-k, at equal perplexity on test text.

`python -m tests.benchmarks.flash_selection [--models …] [--devices …] [--orders …] [--groups …] [--blocks N]`. The
inputs of all matrices of the MLP are pruned. There are as many units as the model has, each of the size that it has in
a 7B (hidden 4096, inner 11008) in int4; nothing is in DRAM. Reads are the runtime's planner's, seconds the device's.
`top-k` collapses reads over the gap, of four, that takes least on validation text; `use_read_units` has the same reads
and computes with all they bring; `greedy` takes contiguous chunks by importance over seconds, after the description of
Neuron Chunking (2511.18692); `flash` is the product's selector with one density for all layers; `by loss` the same with
prices that follow each layer's loss per importance: Fisher information of the signal on calibration text. A curve has
one point per density; between points milliseconds are linear in log perplexity, and all are held to top-k's perplexity
at two densities. The last line has `rows`, `median_gain_over_topk`, `worst_gain_over_topk` and
`median_gain_over_greedy` of `flash`, and the same of `by loss`. The order `own` is made for this selection.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from compiler.activity.signals import magnitude_edges
from compiler.activity.unit_statistics import unit_norms
from compiler.cost_model import read_units
from compiler.evaluate import Sparse, evaluate
from compiler.profiles import load_device
from compiler.reads import Placed, Reading, reads_of
from runtime._plugins import load
from runtime.planner import Strided
from runtime.sparsity import flash, topk
from runtime.store import MAX_READ_BYTES
from schemas.device import Flash
from tests.benchmarks import sparsity
from tests.benchmarks._cases import MODELS, Case, case_of
from tests.benchmarks._greedy_chunks import greedy_chunks
from tests.benchmarks._report import finish, show
from tests.benchmarks._sensitivity import fisher
from tests.support.statistics import task_of

FAMILIES_PRUNED = ("mlp_in", "mlp_mid")
UNIT_BYTES = {"mlp_in": 2 * 11008 * 18 // 32, "mlp_mid": 4096 * 18 // 32}
GAPS = (0.0, 0.25, 0.5, 1.0)
"""Of the break-even gap."""
TOPK_DENSITIES = (0.2, 0.3, 0.4, 0.5, 0.6)
FLASH_DENSITIES = (0.25, 0.35, 0.45, 0.6, 0.75)
EQUAL_TO = (0.5, 0.3)
"""Densities of top-k whose perplexity the others are held to."""
CALIBRATION_BLOCKS, VALIDATION_BLOCKS = 6, 2
Orders = Mapping[tuple[int, str], np.ndarray]
Curve = list[dict[str, float]]


@dataclass(frozen=True)
class Known:
    """A model, its text, and what calibration text says of it, by layer and family."""

    case: Case
    test: np.ndarray
    signals: Mapping[tuple[int, str], np.ndarray]
    """float32 [T, num_units], of the dense model."""
    norms: Mapping[tuple[int, str], np.ndarray]
    loss: Mapping[tuple[int, str], float]
    """Loss per importance (`flash`): the mean of Fisher information times square, over that of importance."""

    @property
    def keys(self) -> list[tuple[int, str]]:
        """All layers and families."""
        return list(self.norms)


@dataclass(frozen=True)
class Setting:
    """How units lie and are read."""

    known: Known
    flash: Flash
    groups: int
    orders: Orders

    def reading(self, gap_bytes: float, use_read_units: bool) -> Reading:
        """For the evaluation."""
        placed = {
            (layer, family): Placed(
                Strided(layer % self.groups * UNIT_BYTES[family], UNIT_BYTES[family], self.groups * UNIT_BYTES[family]),
                self.orders[layer, family],
            )
            for layer, family in self.known.keys
        }
        return Reading(self.flash, int(gap_bytes), MAX_READ_BYTES, use_read_units, placed)

    def costs(self, family: str) -> np.ndarray:
        """See compiler/cost_model.py."""
        return read_units(self.flash, UNIT_BYTES[family], self.groups)

    @property
    def kept_together(self) -> float:
        """The least gap that does not take an interval of a layer group apart, where one read of it is faster."""
        between = (self.groups - 1) * max(UNIT_BYTES.values())
        return between if between < self.flash.break_even_gap_bytes else 0.0


def known_of(name: str, folder: Path, num_blocks: int) -> Known:
    """One dense pass over calibration text, and one with gradients."""
    case = case_of(name, folder, sparsity.SPLITS)
    case.stream.threads = 1
    calibration = case.splits["calibration"][:CALIBRATION_BLOCKS]
    seen: dict[tuple[int, str], list[np.ndarray]] = {}

    def select_many(values: np.ndarray, arrays: Any) -> np.ndarray:
        seen.setdefault(arrays["key"], []).append(values.copy())
        return np.ones(values.shape, bool)

    keys = [(layer, family) for layer in range(case.model.spec.num_hidden_layers) for family in FAMILIES_PRUNED]
    evaluate(case.stream, calibration, _with(select_many, keys))
    signals = {key: np.concatenate(parts) for key, parts in seen.items()}
    norms = {key: unit_norms(case.model, *key) for key in keys}  # type: ignore[arg-type]
    information = fisher(name, calibration, case.model.spec.num_hidden_layers)
    loss = {}
    for key in keys:
        squares = (signals[key].astype(np.float64) ** 2).mean(0)
        loss[key] = float((information[key] * squares).sum() / (norms[key] ** 2 * squares).sum())
    return Known(case, case.splits["test"][:num_blocks], signals, norms, loss)


def _with(select_many: Callable[[np.ndarray, Any], np.ndarray], keys: list[tuple[int, str]]) -> Sparse:
    selector: Any = SimpleNamespace(select_many=select_many, SEES_RESIDENCY=False)
    return Sparse(selector, FAMILIES_PRUNED, {key: {"key": key} for key in keys})  # type: ignore[dict-item]


def measure(setting: Setting, sparse: Sparse, reading: Reading, density: float) -> dict[str, float]:
    """Perplexity on test text, and milliseconds of a token's reads."""
    tokens = setting.known.test
    found = evaluate(setting.known.case.stream, tokens, sparse, reading=reading)
    ms = 1e3 * found.flash_s / tokens.size
    return {"asked": density, "ppl": found.ppl, "ms": ms, "density": found.mlp_density}


class TopK:
    """Top-k's masks, which hang on nothing but the density: computed once per model."""

    def __init__(self, known: Known) -> None:
        """Runs every density over validation and test text."""
        self.ppl: dict[float, float] = {}
        self.masks: dict[tuple[str, float], list[tuple[tuple[int, str], np.ndarray]]] = {}
        texts = {"validation": known.case.splits["validation"][:VALIDATION_BLOCKS], "test": known.test}
        for density in TOPK_DENSITIES:
            for split, tokens in texts.items():
                found = self.masks[split, density] = []
                score = evaluate(known.case.stream, tokens, _with(_keeping(density, found), known.keys))
                if split == "test":
                    self.ppl[density] = score.ppl

    def ms(self, setting: Setting, split: str, density: float, gap_bytes: float) -> float:
        """Of a token's reads."""
        reading = setting.reading(gap_bytes, use_read_units=False)
        masks = self.masks[split, density]
        seconds = math.fsum(reads_of(mask, reading.placed[key], reading).seconds.sum() for key, mask in masks)
        return 1e3 * seconds * len(setting.known.keys) / sum(len(mask) for _, mask in masks)

    def best_gap(self, setting: Setting, density: float) -> float:
        """Of GAPS, by validation text, bytes."""
        even = setting.flash.break_even_gap_bytes
        return min((share * even for share in GAPS), key=lambda gap: self.ms(setting, "validation", density, gap))


def _keeping(density: float, found: list[Any]) -> Callable[[np.ndarray, Any], np.ndarray]:
    def select_many(values: np.ndarray, arrays: Any) -> np.ndarray:
        mask = topk.select_many(values, _count(values, density))
        found.append((arrays["key"], mask))
        return mask

    return select_many


def _count(values: np.ndarray, density: float) -> dict[str, np.ndarray]:
    return {"num_selected": np.array([topk.num_selected(values.shape[1], density)])}


def topk_curves(setting: Setting, masks: TopK) -> tuple[Curve, Curve]:
    """Top-k, and the same with `use_read_units`."""
    plain: Curve = []
    along: Curve = []
    for density in TOPK_DENSITIES:
        gap = masks.best_gap(setting, density)
        ms = masks.ms(setting, "test", density, gap)
        plain.append({"asked": density, "ppl": masks.ppl[density], "ms": ms, "density": density, "gap_bytes": gap})
        sparse = _with(_keeping(density, []), setting.known.keys)
        along.append(measure(setting, sparse, setting.reading(gap, use_read_units=True), density))
    return plain, along


def greedy_curve(setting: Setting) -> Curve:
    """Contiguous chunks by importance over seconds, until the density is reached."""
    curve: Curve = []
    for density in FLASH_DENSITIES:

        def select_many(values: np.ndarray, arrays: Any, density: float = density) -> np.ndarray:
            return _chunks(setting, values, arrays["key"], density)

        reading = setting.reading(setting.kept_together, use_read_units=True)
        curve.append(measure(setting, _with(select_many, setting.known.keys), reading, density))
    return curve


def _chunks(setting: Setting, values: np.ndarray, key: tuple[int, str], density: float) -> np.ndarray:
    order = setting.orders[key]
    importance = ((values * setting.known.norms[key]) ** 2)[:, order]
    mask = np.empty(values.shape, bool)
    mask[:, order] = greedy_chunks(importance, setting.costs(key[1]), topk.num_selected(order.size, density))
    return mask


def flash_curve(setting: Setting, by_loss: bool) -> Curve:
    """The product's selector, one density for all, or prices by loss."""
    reading = setting.reading(setting.kept_together, use_read_units=True)
    curve: Curve = []
    for density in FLASH_DENSITIES:
        arrays = priced(setting, density) if by_loss else fitted(setting, density)
        curve.append(measure(setting, Sparse(flash, FAMILIES_PRUNED, arrays), reading, density))
    return curve


def fitted(setting: Setting, density: float) -> dict[tuple[int, str], dict[str, np.ndarray]]:
    """By the selector's own `fit`."""
    edges = magnitude_edges()
    found: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    for key, signal in setting.known.signals.items():
        counts = np.histogram(np.abs(signal), edges)[0]
        known = {"magnitude_histogram": counts, "magnitude_edges": edges, "unit_norms": setting.known.norms[key]}
        found[key] = flash.fit(signal.shape[1], density, known | {"read_units": setting.costs(key[1])}, flash.Options())
    return found


def priced(setting: Setting, density: float) -> dict[tuple[int, str], dict[str, np.ndarray]]:
    """One price of a second in loss, at which calibration text uses `density` of all bytes."""
    low, high = 1e-12, 1e12
    arrays: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    total = sum(UNIT_BYTES[family] * signal.shape[1] for (_, family), signal in setting.known.signals.items())
    for _ in range(24):
        price = math.sqrt(low * high)
        used = 0.0
        for (layer, family), signal in setting.known.signals.items():
            per_unit = price * setting.groups * UNIT_BYTES[family] / setting.flash.bytes_per_s
            key = (layer, family)
            order = setting.orders[key]
            arrays[key] = {
                "price": np.array([per_unit / setting.known.loss[key]], np.float32),
                "read_units": setting.costs(family).astype(np.float32),
                "unit_norms": setting.known.norms[key],
            }
            in_order = arrays[key] | {"unit_norms": setting.known.norms[key][order]}
            mask = flash.select_many(np.ascontiguousarray(signal[::24][:, order]), in_order)
            used += mask.mean() * UNIT_BYTES[family] * signal.shape[1]
        low, high = (price, high) if used > density * total else (low, price)
    return arrays


def structural(known: Known, setting: Setting | None) -> Orders:
    """The model's own order."""
    return {key: np.arange(norms.size) for key, norms in known.norms.items()}


def coactivation(known: Known, setting: Setting | None) -> Orders:
    """Ripple's Algorithm 1 on what top-k at half of the units uses of calibration text."""
    return {
        key: _arranged(topk.select_many(signal, _count(signal, 0.5)), key[1]) for key, signal in known.signals.items()
    }


def own(known: Known, setting: Setting | None) -> Orders:
    """Algorithm 1 on the units that are worth their bytes by themselves at the prices of `by loss`."""
    assert setting is not None
    arrays = priced(setting, 0.45)
    return {
        key: _arranged((signal * known.norms[key]) ** 2 > arrays[key]["price"][0], key[1])
        for key, signal in known.signals.items()
    }


def _arranged(used: np.ndarray, family: str) -> np.ndarray:
    return load("compiler.order", "ripple").arrange(task_of(used.T, unit_bytes=UNIT_BYTES[family])).order


ORDERS: Mapping[str, Callable[[Known, Setting | None], Orders]] = {
    "structural": structural,
    "coactivation": coactivation,
    "own": own,
}


def ms_at(curve: Curve, ppl: float) -> float:
    """Milliseconds where a curve has that perplexity; NaN outside of it."""
    points = sorted((math.log(row["ppl"]), row["ms"]) for row in curve)
    x, y = zip(*points, strict=True)
    return float(np.interp(math.log(ppl), x, y)) if x[0] <= math.log(ppl) <= x[-1] else math.nan


def compared(setting: Setting, masks: TopK, labels: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per perplexity: milliseconds of every method."""
    curves: dict[str, Curve] = {}
    curves["top-k"], curves["use_read_units"] = topk_curves(setting, masks)
    curves["greedy"] = greedy_curve(setting)
    curves["flash"] = flash_curve(setting, by_loss=False)
    curves["by loss"] = flash_curve(setting, by_loss=True)
    print(json.dumps(labels | {"curves": curves}), flush=True)
    return [
        labels | {"density": density, "ppl": ppl} | {name: ms_at(curve, ppl) for name, curve in curves.items()}
        for density in EQUAL_TO
        for ppl in [masks.ppl[density]]
    ]


def rows_of(arguments: argparse.Namespace, name: str, folder: Path) -> list[dict[str, Any]]:
    """All cases of a model."""
    known = known_of(name, folder, arguments.blocks)
    masks = TopK(known)
    rows: list[dict[str, Any]] = []
    for device in arguments.devices:
        profile = load_device(Path("profiles/devices") / f"{device}.yaml").flash
        for groups in arguments.groups:
            for order in arguments.orders:
                if groups > 1 and order != "structural":
                    continue  # a group has one order for all its layers, and nothing else is compared here
                setting = Setting(known, profile, groups, structural(known, None))
                setting = Setting(known, profile, groups, ORDERS[order](known, setting))
                labels = {"model": name, "device": device, "groups": groups, "order": order}
                rows += compared(setting, masks, labels)
    return rows


def gains(rows: list[dict[str, Any]], over: str, ours: str) -> list[float]:
    """Seconds of a method over ours, where both curves reach the perplexity."""
    found = (row[over] / row[ours] for row in rows)
    return [gain for gain in found if not math.isnan(gain)]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the last line."""
    found: dict[str, Any] = {"rows": rows}
    for ours, suffix in (("flash", ""), ("by loss", "_by_loss")):
        over_topk, over_greedy = gains(rows, "top-k", ours), gains(rows, "greedy", ours)
        found |= {
            f"median_gain_over_topk{suffix}": statistics.median(over_topk) if over_topk else None,
            f"worst_gain_over_topk{suffix}": min(over_topk, default=None),
            f"median_gain_over_greedy{suffix}": statistics.median(over_greedy) if over_greedy else None,
            f"worst_gain_over_greedy{suffix}": min(over_greedy, default=None),
            f"num_compared{suffix}": len(over_topk),
        }
    return found


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["prose7m", "tinystories656k", "stories260k"], choices=list(MODELS)
    )
    parser.add_argument("--devices", nargs="+", default=["pixel6", "infinix-zero30"])
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=list(ORDERS))
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--blocks", type=int, default=4, help="of 256 tokens of test text")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(arguments, name, Path(folder))
    names = ["top-k", "use_read_units", "greedy", "flash", "by loss"]
    columns = ["model", "device", "groups", "order", "ppl", *names]
    show("ms of reads a token at equal perplexity", columns, [[row[name] for name in columns] for row in rows])
    finish(summary(rows))


if __name__ == "__main__":
    main()
