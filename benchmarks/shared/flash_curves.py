"""Milliseconds of reads against perplexity, density by density, of each choice in benchmarks.flash_selection."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.evaluation.evaluate import Sparse, evaluate
from benchmarks.evaluation.reads import Reading, reads_of, requests_seconds
from benchmarks.shared.flash_prices import fitted, priced
from benchmarks.shared.flash_setting import FAMILIES_PRUNED, UNIT_BYTES, Known, Setting, masked_by, top_k
from benchmarks.shared.greedy_chunks import greedy_chunks
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.sparsity import Residency, flash, topk
from tests.support.caches import empty

GAPS = (0.0, 0.25, 0.5, 1.0)
"""Of the break-even gap."""
TOPK_DENSITIES = (0.2, 0.3, 0.4, 0.5, 0.6)
FLASH_DENSITIES = (0.25, 0.35, 0.45, 0.6, 0.75)
VALIDATION_BLOCKS = 2
Curve = list[dict[str, float]]


def measure(setting: Setting, sparse: Sparse, reading: Reading, density: float) -> dict[str, float]:
    """Perplexity on test text, and milliseconds of a token's reads, and of its requests, computing among them."""
    tokens = setting.known.test
    found = evaluate(setting.known.case.stream, tokens, sparse, setting.cache, reading=reading)
    ms, token_ms = 1e3 * found.flash_s / tokens.size, 1e3 * found.request_s / tokens.size
    return {"asked": density, "ppl": found.ppl, "ms": ms, "token_ms": token_ms, "density": found.mlp_density}


class TopK:
    """Returns top-k's masks; they depend on the density alone, so they are computed once per model."""

    def __init__(self, known: Known) -> None:
        """Runs every density over validation and test text."""
        self.ppl: dict[float, float] = {}
        self.masks: dict[tuple[str, float], list[tuple[tuple[int, str], np.ndarray]]] = {}
        texts = {"validation": known.case.splits["validation"][:VALIDATION_BLOCKS], "test": known.test}
        for density in TOPK_DENSITIES:
            for split, tokens in texts.items():
                found = self.masks[split, density] = []
                keeping = _keeping(known.used * density, found)
                score = evaluate(known.case.stream, tokens, masked_by(keeping, known.keys))
                if split == "test":
                    self.ppl[density] = score.ppl

    def ms(self, setting: Setting, split: str, density: float, gap_bytes: float) -> float:
        """Of a token's reads."""
        reading = setting.reading(gap_bytes, use_read_units=False)
        missing = self.missing(setting, split, density)
        seconds = math.fsum(reads_of(mask, reading.placed[key], reading).seconds.sum() for key, mask in missing)
        return 1e3 * seconds * len(setting.known.keys) / sum(len(mask) for _, mask in missing)

    def missing(self, setting: Setting, split: str, density: float) -> list[tuple[tuple[int, str], np.ndarray]]:
        """What of the masks no cache has: a layer's blocks come one after another."""
        if not setting.slots:
            return self.masks[split, density]
        caches = {
            key: empty("lru", setting.known.norms[key].size, setting.num_slots(key)) for key in setting.known.keys
        }
        return [(key, _missing(caches[key], mask)) for key, mask in self.masks[split, density]]

    def token_ms(self, setting: Setting, density: float, gap_bytes: float) -> float:
        """Of a token's requests of test text, computing among them; a cache keeps all that is missed."""
        reading, seconds, num_tokens = setting.reading(gap_bytes, use_read_units=False), 0.0, 0
        found = self.missing(setting, "test", density)
        for (key, mask), (_, missing) in zip(self.masks["test", density], found, strict=True):
            reads = reads_of(missing, reading.placed[key], reading)
            size, units = UNIT_BYTES[key[1]], round(setting.known.used * mask.shape[1])
            active = size * np.count_nonzero(mask, axis=1)
            missed = size * np.count_nonzero(missing, axis=1)
            kept = missed * bool(setting.slots)
            seconds += requests_seconds(setting.device, size * units, reads, active, missed, kept)
            num_tokens += len(mask)
        return 1e3 * seconds * len(setting.known.keys) / num_tokens

    def best_gap(self, setting: Setting, density: float) -> float:
        """Of GAPS, by validation text, bytes."""
        even = setting.flash.break_even_gap_bytes
        return min((share * even for share in GAPS), key=lambda gap: self.ms(setting, "validation", density, gap))


def _missing(cache: CachePolicy, mask: np.ndarray) -> np.ndarray:
    missing = mask.copy()
    for row in missing:
        ids = np.flatnonzero(row)
        row[ids[cache.serve(ids)]] = False
    return missing


def _keeping(density: float, found: list[Any]) -> Callable[[np.ndarray, Any], np.ndarray]:
    def select_many(values: np.ndarray, arrays: Any) -> np.ndarray:
        mask = top_k(values, density)
        found.append((arrays["key"], mask))
        return mask

    return select_many


def topk_curves(setting: Setting, masks: TopK) -> tuple[Curve, Curve]:
    """Top-k, and the same with `use_read_units`."""
    plain: Curve = []
    along: Curve = []
    for density in TOPK_DENSITIES:
        gap = masks.best_gap(setting, density)
        ms = masks.ms(setting, "test", density, gap)
        token_ms = masks.token_ms(setting, density, gap)
        row = {"asked": density, "ppl": masks.ppl[density], "ms": ms, "token_ms": token_ms, "density": density}
        plain.append(row | {"gap_bytes": gap})
        sparse = masked_by(_keeping(setting.known.used * density, []), setting.known.keys)
        along.append(measure(setting, sparse, setting.reading(gap, use_read_units=True), density))
    return plain, along


def greedy_curve(setting: Setting) -> Curve:
    """Contiguous chunks by importance over seconds, until that share of what is not in DRAM is read."""
    curve: Curve = []
    for asked in densities(setting):
        density = setting.known.used * asked

        def select_many(values: np.ndarray, arrays: Any, density: float = density) -> np.ndarray:
            importance = (values * setting.known.norms[arrays["key"]]) ** 2
            return _chunks(setting, importance, arrays["key"], topk.num_selected(values.shape[1], density))

        def select(signal: np.ndarray, arrays: Any, residency: Residency, density: float = density) -> np.ndarray:
            key, here = arrays["key"], residency.present
            importance = (signal * setting.known.norms[key]) ** 2
            away = topk.num_selected(int(np.count_nonzero(~here)), density)
            read = _chunks(setting, np.where(here, 0, importance)[None], key, away)[0] & ~here
            used_again = here & topk.largest(importance[None], topk.num_selected(here.size, density))[0]
            return np.flatnonzero(read | used_again).astype(np.int32)

        reading = setting.reading(setting.kept_together, use_read_units=True)
        sparse = masked_by(select_many, setting.known.keys, select if setting.slots else None)
        curve.append(measure(setting, sparse, reading, asked))
    return curve


def _chunks(setting: Setting, importance: np.ndarray, key: tuple[int, str], wanted: int) -> np.ndarray:
    order = setting.orders[key]
    mask = np.empty(importance.shape, bool)
    mask[:, order] = greedy_chunks(importance[:, order], setting.costs(key[1]), wanted)
    return mask


def densities(setting: Setting) -> tuple[float, ...]:
    """Smaller ones, too, of choices that use what is in DRAM besides, where something is."""
    return (0.1, 0.2, *FLASH_DENSITIES) if setting.slots else FLASH_DENSITIES


def flash_curve(setting: Setting, by_loss: bool) -> Curve:
    """The product's selector, one density for all, or densities by loss."""
    reading = setting.reading(setting.kept_together, use_read_units=True)
    curve: Curve = []
    for density in densities(setting):
        arrays = priced(setting, density) if by_loss else fitted(setting, dict.fromkeys(setting.known.keys, density))
        curve.append(measure(setting, Sparse(flash.Plugin(), FAMILIES_PRUNED, arrays), reading, density))
    return curve
