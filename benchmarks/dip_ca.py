"""Cache-aware masking: perplexity against hit rate by gamma, and modelled tokens per second against DIP (DIP Fig. 11).

The model is in the loop: a choice sees what its layer's cache holds, token by token, in blocks one after another, the
first of which warm the caches and are not scored. Inputs of the MLP are pruned by DIP's division; a layer's cache holds
a stated share of its units; there are as many units as the model has, each as large as a 7B's in int4. A request takes
the device's seconds for the reads of what it misses, or memory's for computing with all it uses, whichever is more.
What DIP chooses depends on no cache, so each policy replays its choices, and `belady` knows them all beforehand.
`along` is `dip_ca` with `use_read_units`, and `flash` that selector, both with an LRU cache. A curve has one point per
density and is linear in log perplexity. Gamma and the cache beside it are chosen on validation text, at the perplexity
that DIP has there at half of the weights; gains are of test text.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.evaluation.evaluate import CacheSettings, Sparse, evaluate
from benchmarks.evaluation.reads import Placed, Reading, reads_of, requests_seconds
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.harness.places import ROOT
from benchmarks.shared.cases import BLOCK_TOKENS, MODELS, Case
from benchmarks.shared.flash_prices import fitted
from benchmarks.shared.flash_setting import FAMILIES_PRUNED, UNIT_BYTES, Known, Setting, known_of
from coldpress.compiler.profiles import load_device
from coldpress.runtime.sparsity import Residency, dip_ca, flash, topk
from coldpress.runtime.store.planner import Strided
from coldpress.runtime.store.reads import MAX_READ_BYTES
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import num_units
from tests.support.caches import empty, missed

GAMMAS = (0.0, 0.1, 0.2, 0.35, 0.6)
ALONG_GAMMAS = (0.2, 0.5, 1.0)
DENSITIES = (0.3, 0.4, 0.5, 0.6, 0.75)
ALONG_DENSITIES = (0.15, 0.25, 0.35, 0.5, 0.65)
"""What is in DRAM is used besides."""
EQUAL_TO = (0.5, 0.4)
"""Densities of DIP whose perplexity the others are held to; gamma is chosen for the first."""
POLICIES = ("static", "lru", "lfu", "belady")
AWARE = ("lru", "lfu")
"""Caches that a choice is made with."""
WARM_UP_BLOCKS = 1
Key = tuple[int, str]


@dataclass
class Asked:
    """What tokens used, in order, and what of it they missed: ids of each layer and family."""

    used: dict[Key, list[np.ndarray]] = field(default_factory=dict)
    missed: dict[Key, list[np.ndarray]] = field(default_factory=dict)
    keeps: bool = True
    """Whether what is missed is kept."""

    def add(self, key: Key, used: np.ndarray, missed: np.ndarray) -> None:
        self.used.setdefault(key, []).append(used)
        self.missed.setdefault(key, []).append(missed)

    def scored(self) -> "Asked":
        """Behind the warm-up."""
        first = WARM_UP_BLOCKS * BLOCK_TOKENS
        used, missed = ({key: ids[first:] for key, ids in all_ids.items()} for all_ids in (self.used, self.missed))
        return Asked(used, missed, self.keeps)

    @property
    def hit_rate(self) -> float:
        used, missed = (sum(ids.size for part in found.values() for ids in part) for found in (self.used, self.missed))
        return 1 - missed / used


@dataclass(frozen=True)
class Work:
    """A model, text, and the share of each layer's units that a cache holds."""

    known: Known
    tokens: np.ndarray
    slots: float

    @property
    def case(self) -> Case:
        return self.known.case

    def cache(self, policy: str) -> CacheSettings:
        return CacheSettings(policy, {name: round(self.slots * self.units(name)) for name in UNIT_BYTES})

    def units(self, family: str) -> int:
        return num_units(family, self.case.model.spec)  # type: ignore[arg-type]

    def arrays(self, density: float, gamma: float) -> dict[Key, dict[str, Any]]:
        """The selector's, and `key`."""
        spec, options = self.case.model.spec, dip_ca.Options(gamma=gamma)
        return {
            (layer, family): {**dip_ca.Plugin().fit(self.units(family), share, {}, options), "key": (layer, family)}
            for family, share in dip_ca.Plugin().divide(density, spec, options).items()
            for layer in range(spec.num_hidden_layers)
        }

    def reading(self, device: DeviceProfile, use_read_units: bool) -> Reading:
        """In the model's own order."""
        layers = range(self.case.model.spec.num_hidden_layers)
        placed = {
            (layer, name): Placed(Strided(0, size, size), np.arange(self.units(name)))
            for name, size in UNIT_BYTES.items()
            for layer in layers
        }
        gap_bytes = device.flash.break_even_gap_bytes // 4
        return Reading(device.flash, gap_bytes, MAX_READ_BYTES, use_read_units, placed, device)


def choose(work: Work, density: float, gamma: float, policy: str | None) -> tuple[float, Asked]:
    """Perplexity, and what was asked for: by `dip_ca` with that cache, or where there is none by DIP."""
    asked = Asked()

    def select(signal: np.ndarray, kept: Mapping[str, Any], residency: Residency) -> np.ndarray:
        ids = dip_ca.Plugin().select(signal, kept, residency)
        asked.add(kept["key"], ids, ids[~residency.present[ids]])
        return ids

    def select_many(values: np.ndarray, kept: Mapping[str, Any]) -> np.ndarray:
        mask = topk.Plugin().select_many(values, kept)
        for row in mask:
            ids = np.flatnonzero(row)
            asked.add(kept["key"], ids, ids)
        return mask

    selector: Any = SimpleNamespace(select=select, select_many=select_many, SEES_RESIDENCY=True)
    sparse = Sparse(selector, FAMILIES_PRUNED, work.arrays(density, gamma))
    cache = work.cache(policy) if policy else None
    return evaluate(work.case.stream, work.tokens, sparse, cache, WARM_UP_BLOCKS).ppl, asked


def using_along(work: Work, sparse: Sparse, device: DeviceProfile) -> Row:
    """With `use_read_units` and an LRU cache."""
    reading = work.reading(device, use_read_units=True)
    found = evaluate(work.case.stream, work.tokens, sparse, work.cache("lru"), WARM_UP_BLOCKS, reading)
    scored = work.tokens[WARM_UP_BLOCKS:].size
    hit_rate = found.hits / (found.hits + found.misses)
    return {"ppl": found.ppl, "hit_rate": hit_rate, "tokens_per_s": scored / found.request_s}


def rows_along(work: Work, device: DeviceProfile, density: float, gammas: Iterable[float]) -> Iterator[Row]:
    """Of `along` and `flash`."""
    for gamma in gammas:
        sparse = Sparse(dip_ca.Plugin(), FAMILIES_PRUNED, work.arrays(density, gamma))
        yield {"method": "along", "gamma": gamma} | using_along(work, sparse, device)
    setting = Setting(work.known, device, 1, {}, work.slots)
    arrays = fitted(setting, dict.fromkeys(work.known.keys, density))
    yield {"method": "flash", "gamma": 1.0} | using_along(work, Sparse(flash.Plugin(), FAMILIES_PRUNED, arrays), device)


def replayed(work: Work, asked: Asked, policy: str) -> Asked:
    """The same uses with that cache."""
    found = Asked(asked.used, keeps=policy != "static")
    for key, requests in asked.used.items():
        units, capacity = work.units(key[1]), round(work.slots * work.units(key[1]))
        found.missed[key] = missed(empty(policy, units, capacity, requests=requests), requests)
    return found


def tokens_per_s(work: Work, asked: Asked, device: DeviceProfile) -> float:
    """By the device's law, request by request; a cache keeps all that is missed, `static` nothing."""
    seconds, num_tokens = 0.0, 0
    reading = work.reading(device, use_read_units=False)
    for key, requests in asked.missed.items():
        size, wanted = UNIT_BYTES[key[1]], np.zeros((len(requests), work.units(key[1])), bool)
        for row, ids in zip(wanted, requests, strict=True):
            row[ids] = True
        reads = reads_of(wanted, reading.placed[key], reading)
        active, missed = (size * np.array([ids.size for ids in found]) for found in (asked.used[key], requests))
        all_bytes = size * work.units(key[1])
        seconds += requests_seconds(device, all_bytes, reads, active, missed, asked.keeps * missed)
        num_tokens = len(requests)
    return num_tokens / seconds


def rows_of(work: Work, devices: Sequence[DeviceProfile], density: float, gammas: Iterable[float]) -> Iterator[Row]:
    """A row per device and way."""
    ppl, asked = choose(work, density, 1.0, None)
    ways = [("dip", policy, 1.0, ppl, replayed(work, asked, policy)) for policy in POLICIES]
    ways += [("dip_ca", policy, gamma, *choose(work, density, gamma, policy)) for gamma in gammas for policy in AWARE]
    for method, policy, gamma, ppl, uses in ways:
        scored = uses.scored()
        for device in devices:
            row = {"device": device.name, "method": method, "policy": policy, "gamma": gamma, "ppl": ppl}
            yield row | {"hit_rate": scored.hit_rate, "tokens_per_s": tokens_per_s(work, scored, device)}


def speed_at(rows: Rows, ppl: float) -> float:
    """Tokens per second where a curve has that perplexity; NaN outside of it."""
    points = sorted((math.log(row["ppl"]), math.log(row["tokens_per_s"])) for row in rows)
    x, y = zip(*points, strict=True)
    return math.exp(float(np.interp(math.log(ppl), x, y))) if x[0] <= math.log(ppl) <= x[-1] else math.nan


def curves(rows: Rows, device: str, method: str) -> dict[tuple[str, float], list[Row]]:
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if (row["device"], row["method"]) == (device, method):
            found.setdefault((row["policy"], row["gamma"]), []).append(row)
    return found


def ppl_of_dip(rows: Rows, density: float) -> float:
    return next(row["ppl"] for row in rows if (row["density"], row["method"]) == (density, "dip"))


def best(rows: Rows, device: str, method: str) -> tuple[str, float]:
    """Policy and gamma that are fastest at DIP's perplexity at the first of EQUAL_TO."""
    target = ppl_of_dip(rows, EQUAL_TO[0])
    speeds = {way: speed_at(points, target) for way, points in curves(rows, device, method).items()}
    reaching = (way for way, speed in speeds.items() if not math.isnan(speed))
    return max(reaching, key=lambda way: speeds[way], default=next(iter(speeds)))


def gains(test: Rows, validation: Rows, device: str) -> Iterator[Row]:
    """Over DIP by policy, at each perplexity, of what is best on validation text."""
    for method, density in itertools.product(("dip_ca", "along", "flash"), EQUAL_TO):
        way, ppl = best(validation, device, method), ppl_of_dip(test, density)
        ours = speed_at(curves(test, device, method)[way], ppl)
        plain = curves(test, device, "dip")
        gain = {policy: ours / speed_at(plain[policy, 1.0], ppl) for policy in POLICIES}
        yield {"device": device, "as_dip_at": density, "method": method, "chosen": list(way)} | gain


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",), smoke=("stories260k",), full=("prose7m", "tinystories656k"), choices=MODELS, help="models"
    )
    devices: tuple[str, ...] = option(("pixel6",), full=("pixel6", "iphone-a18"), help="device profiles")
    slots: tuple[float, ...] = option((0.5,), full=(0.5, 0.3), help="shares of the units in the cache")
    gammas: tuple[float, ...] = option((0.2, 0.35), smoke=(0.2,), full=GAMMAS, help="gammas of dip_ca")
    along_gammas: tuple[float, ...] = option((0.5,), full=ALONG_GAMMAS, help="gammas of `along`")
    densities: tuple[float, ...] = option(
        (0.4, 0.5, 0.6, 0.75), smoke=(0.4, 0.5), full=DENSITIES, help="densities of DIP and dip_ca; 0.5 and 0.4 of them"
    )
    along_densities: tuple[float, ...] = option(
        (0.25, 0.35, 0.5), smoke=(0.35,), full=ALONG_DENSITIES, help="densities of `along` and `flash`"
    )
    blocks: int = option(3, smoke=2, full=5, help="blocks of 256 tokens of each text, the warm-up among them")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "model",
        "rows[].slots": "share of the units in the cache",
        "rows[].split": "validation: parameters are chosen on it; test: gains are of it",
        "rows[].density": "density of the MLP that was asked for",
        "rows[].along": "whether all that is read is used",
        "rows[].device": "device profile",
        "rows[].method": "dip, dip_ca, along, flash",
        "rows[].policy": "cache policy",
        "rows[].gamma": "gamma; 1 is dip",
        "rows[].ppl": "perplexity",
        "rows[].hit_rate": "share of the used units that were in DRAM",
        "rows[].tokens_per_s": "modelled tokens per second",
        "throughput_gain_at_equal_ppl[].model": "model",
        "throughput_gain_at_equal_ppl[].slots": "share of the units in the cache",
        "throughput_gain_at_equal_ppl[].device": "device profile",
        "throughput_gain_at_equal_ppl[].as_dip_at": "density at which DIP has that perplexity",
        "throughput_gain_at_equal_ppl[].method": "what is compared with DIP",
        "throughput_gain_at_equal_ppl[].chosen": "policy and gamma, chosen on validation text",
        **{
            f"throughput_gain_at_equal_ppl[].{policy}?": f"tokens per second over DIP with {policy}; null: out of reach"
            for policy in POLICIES
        },
    }
    needs_data = True
    full_minutes = 240

    def cells(self) -> Iterator[Cell]:
        options = self.options
        for model, slots, split in itertools.product(options.models, options.slots, ("validation", "test")):
            for along, densities in ((False, options.densities), (True, options.along_densities)):
                for density in densities:
                    yield {"model": model, "slots": slots, "split": split, "density": density, "along": along}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """A row per device and way."""
        options, name, density = self.options, cell["model"], cell["density"]
        known = self.once(name, lambda: known_of(name, self.folder / name, options.blocks))
        work = Work(known, known.case.splits[cell["split"]][: options.blocks], cell["slots"])
        devices = [load_device(ROOT / "profiles/devices" / f"{device}.yaml") for device in options.devices]
        if not cell["along"]:
            yield from rows_of(work, devices, density, options.gammas)
            return
        for device in devices:
            for row in rows_along(work, device, density, options.along_gammas):
                yield {"device": device.name, "policy": "lru", **row}

    def figures(self, rows: Rows) -> Figures:
        found: list[Row] = []
        for model, slots in itertools.product(self.options.models, self.options.slots):
            validation, test = (
                [row for row in rows if (row["model"], row["slots"], row["split"]) == (model, slots, split)]
                for split in ("validation", "test")
            )
            for device in dict.fromkeys(row["device"] for row in test):
                found += [{"model": model, "slots": slots} | gain for gain in gains(test, validation, device)]
        return {"throughput_gain_at_equal_ppl": found}


if __name__ == "__main__":
    main("dip_ca")
