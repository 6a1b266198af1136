"""Measures cache-aware masking: perplexity against hit rate by gamma, and modelled speed over DIP (DIP Fig. 11).

The model is in the loop: a choice sees the units that its layer's cache holds, token by token. Blocks follow one
another; the first ones warm the caches and are not scored. Inputs of the MLP are pruned by DIP's division; a layer's
cache holds a stated share of its units, which lie in the model's own order (benchmarks/shared/flash_setting.py). A
request takes the device's seconds for reading its misses, or memory's for computing with all used units, whichever is
more. DIP's choice depends on no cache, and `belady` knows it all beforehand. `flash` is that selector with an LRU
cache; it uses all units that it reads. A curve has one point per density and is linear in log perplexity. Gamma and its
cache are chosen on validation text, at DIP's perplexity there with half of the weights; gains are measured on test
text.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.evaluation.evaluate import CacheSettings, Sparse, evaluate, masks_of
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cases import MODELS
from benchmarks.shared.flash_setting import FAMILIES_PRUNED, Known, Setting, at_ppl, known_of
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.sparsity import dip, dip_ca

GAMMAS = (0.0, 0.1, 0.2, 0.35, 0.6)
DENSITIES = (0.3, 0.4, 0.5, 0.6, 0.75)
FLASH_DENSITIES = (0.15, 0.25, 0.35, 0.5, 0.65)
"""Lower densities, since `flash` also uses all units in DRAM."""
EQUAL_TO = (0.5, 0.4)
"""Densities of DIP whose perplexity the others must match; gamma is chosen for the first."""
POLICIES = ("none", "lru", "lfu", "belady")
AWARE = ("lru", "lfu")
"""Caches that a cache-aware choice sees."""
WARM_UP_BLOCKS = 1


def fitted(known: Known, selector: dip.Plugin | dip_ca.Plugin, density: float, gamma: float = 1.0) -> Sparse:
    """Fits DIP at a density, cache-aware or not."""
    spec, own = known.case.model.spec, dip_ca.Options(gamma=gamma)
    shares = selector.divide(density, spec, own)
    arrays = {key: selector.fit(norms.size, shares[key[1]], {}, own) for key, norms in known.norms.items()}
    return Sparse(selector, FAMILIES_PRUNED, arrays)


def scored(
    setting: Setting, tokens: np.ndarray, sparse: Sparse, cache: CacheSettings | None, use_read_units: bool = False
) -> Row:
    """Returns the figures of a choice with a cache."""
    reading = setting.reading(setting.flash.break_even_gap_bytes // 4, use_read_units)
    found = evaluate(setting.known.case.stream, tokens, sparse, cache, WARM_UP_BLOCKS, reading)
    hit_rate = found.hits / max(1, found.hits + found.misses)
    return {"ppl": found.ppl, "hit_rate": hit_rate, "tokens_per_s": tokens[WARM_UP_BLOCKS:].size / found.request_s}


def rows_of(setting: Setting, tokens: np.ndarray, density: float, gammas: tuple[float, ...]) -> Iterator[Row]:
    """Yields a row per cache of DIP, and per gamma and cache of `dip_ca`."""
    known, plain = setting.known, fitted(setting.known, dip.Plugin(), density)
    for policy in POLICIES:
        requests = {}
        if policy == "belady":
            masks = masks_of(known.case.stream, tokens, plain)
            requests = {key: [np.flatnonzero(row).astype(np.int32) for row in mask] for key, mask in masks.items()}
        cache = None if policy == "none" else setting.cache(policy, requests)
        yield {"method": "dip", "policy": policy, "gamma": 1.0} | scored(setting, tokens, plain, cache)
    for gamma, policy in itertools.product(gammas, AWARE):
        sparse = fitted(known, dip_ca.Plugin(), density, gamma=gamma)
        found = scored(setting, tokens, sparse, setting.cache(policy))
        yield {"method": "dip_ca", "policy": policy, "gamma": gamma} | found


def curves(rows: Rows, method: str) -> dict[tuple[str, float], list[tuple[float, float]]]:
    """Returns (policy, gamma) -> (perplexity, log of tokens per second) at each density."""
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for row in rows:
        if row["method"] == method:
            found.setdefault((row["policy"], row["gamma"]), []).append((row["ppl"], math.log(row["tokens_per_s"])))
    return found


def ppl_of_dip(rows: Rows, density: float) -> float:
    return next(row["ppl"] for row in rows if (row["density"], row["method"]) == (density, "dip"))


def best(rows: Rows, method: str) -> tuple[str, float]:
    """Returns the policy and gamma that are fastest at DIP's perplexity at the first of EQUAL_TO."""
    target = ppl_of_dip(rows, EQUAL_TO[0])
    speeds = {way: at_ppl(points, target) for way, points in curves(rows, method).items()}
    reaching = (way for way, speed in speeds.items() if not math.isnan(speed))
    return max(reaching, key=lambda way: speeds[way], default=next(iter(speeds)))


def gains(test: Rows, validation: Rows) -> Iterator[Row]:
    """Yields the gains over each policy of DIP, at each perplexity, of the way that is best on validation text."""
    for method, density in itertools.product(("dip_ca", "flash"), EQUAL_TO):
        way, ppl = best(validation, method), ppl_of_dip(test, density)
        ours, plain = at_ppl(curves(test, method)[way], ppl), curves(test, "dip")
        gain = {policy: math.exp(ours - at_ppl(plain[policy, 1.0], ppl)) for policy in POLICIES}
        yield {"as_dip_at": density, "method": method, "chosen": list(way)} | gain


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",), smoke=("stories260k",), full=("prose7m", "tinystories656k"), choices=MODELS, help="models to mask"
    )
    devices: tuple[str, ...] = option(("pixel6",), full=("pixel6", "iphone-a18"), help="device profiles")
    slots: tuple[float, ...] = option((0.5,), full=(0.5, 0.3), help="shares of a layer's units that its cache holds")
    gammas: tuple[float, ...] = option((0.2, 0.35), smoke=(0.2,), full=GAMMAS, help="gammas of dip_ca")
    densities: tuple[float, ...] = option(
        (0.4, 0.5, 0.6, 0.75), smoke=(0.4, 0.5), full=DENSITIES, help="densities of DIP and dip_ca, with 0.5 and 0.4"
    )
    flash_densities: tuple[float, ...] = option(
        (0.25, 0.35, 0.5), smoke=(0.35,), full=FLASH_DENSITIES, help="densities of `flash`"
    )
    blocks: int = option(3, smoke=2, full=5, help="blocks of 256 tokens of each text; the first is not scored")


SETTINGS = {"model": "models", "device": "devices", "slots": "slots", "split": ("validation", "test")}


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].split": "validation: the way is chosen on it; test: gains are measured on it",
        "rows[].density": "density of the MLP that was asked for",
        "rows[].part": "dip: DIP and dip_ca; flash: the selector of that name",
        "rows[].method": "dip, dip_ca or flash",
        "rows[].policy": "cache policy; none: no cache",
        "rows[].gamma": "gamma of dip_ca; 1 for dip and flash",
        "rows[].ppl": "perplexity on the split's text",
        "rows[].hit_rate": "share of requested units that were in the cache",
        "rows[].tokens_per_s": "modelled tokens per second, from the seconds of the MLPs' requests alone",
        "throughput_gain_at_equal_ppl[].model": "model",
        "throughput_gain_at_equal_ppl[].device": "device profile",
        "throughput_gain_at_equal_ppl[].slots": "share of the units in the cache",
        "throughput_gain_at_equal_ppl[].as_dip_at": "density of DIP whose perplexity all methods match here",
        "throughput_gain_at_equal_ppl[].method": "method that is compared with DIP",
        "throughput_gain_at_equal_ppl[].chosen": "its cache policy and gamma, chosen on validation text",
        **{
            f"throughput_gain_at_equal_ppl[].{policy}?": f"tokens per second over DIP with {policy}; null: not reached"
            for policy in POLICIES
        },
    }
    needs_data = True
    over = (
        {**SETTINGS, "part": ("dip",), "density": "densities"},
        {**SETTINGS, "part": ("flash",), "density": "flash_densities"},
    )
    full_minutes = 300

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per method, cache and gamma."""
        options, name = self.options, cell["model"]
        known = self.once(name, lambda: known_of(name, self.folder / name))
        setting = Setting(known, load_device(cell["device"]), 1, cell["slots"])
        tokens = known.case.splits[cell["split"]][: options.blocks]
        if cell["part"] == "dip":
            yield from rows_of(setting, tokens, cell["density"], options.gammas)
        else:
            found = scored(setting, tokens, setting.flash_selector(cell["density"]), setting.cache(), True)
            yield {"method": "flash", "policy": "lru", "gamma": 1.0} | found

    def figures(self, rows: Rows) -> Figures:
        found: list[Row] = []
        options = self.options
        for values in itertools.product(options.models, options.devices, options.slots):
            of = dict(zip(("model", "device", "slots"), values, strict=True))
            here = [row for row in rows if of.items() <= row.items()]
            validation, test = ([row for row in here if row["split"] == split] for split in ("validation", "test"))
            found += [of | gain for gain in gains(test, validation)]
        return {"throughput_gain_at_equal_ppl": found}


if __name__ == "__main__":
    main("dip_ca")
