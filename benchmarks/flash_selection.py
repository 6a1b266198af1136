"""Compares modelled device seconds of choices that know the flash with top-k's, at equal perplexity on test text.

The inputs of all matrices of the MLP are pruned; each layer keeps a share of its units in an LRU cache that begins
empty, or none. The runtime's planner makes the reads, the device's law their seconds. `top-k` collapses reads over the
gap, of four, that takes least on validation text; `flash` is the product's selector with one density for all layers. A
curve has one point per density; between points milliseconds are linear in log perplexity. Both choices must match
top-k's perplexity at two densities.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.evaluation.evaluate import Sparse, evaluate
from benchmarks.evaluation.reads import Reading
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cases import WITH_MIXTURES
from benchmarks.shared.flash_setting import FAMILIES_PRUNED, Known, Setting, at_ppl, known_of
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.sparsity import topk

TOPK, FLASH = CURVES = ("top-k", "flash")
UNITS = {"": "reads", "_token": "requests"}
"""Suffix of the names of gains -> what takes the milliseconds."""
EQUAL_TO = (0.5, 0.3)
"""Densities of top-k whose perplexity the others must match."""
GAPS = (0.0, 0.25, 0.5, 1.0)
"""Shares of the break-even gap; the best one at the first of EQUAL_TO is taken."""
TOPK_DENSITIES = (0.2, 0.3, 0.4, 0.5, 0.6)
FLASH_DENSITIES = (0.25, 0.35, 0.45, 0.6, 0.75)
LOW_DENSITIES = (0.1, 0.2)
"""Further densities of `flash` with a cache, whose units it uses besides."""
Point = dict[str, float]
"""Perplexity, and milliseconds of a token's reads (`ms`) and of its requests, computing included (`token_ms`)."""


def point(setting: Setting, split: str, num_blocks: int, sparse: Sparse, reading: Reading) -> Point:
    """Evaluates a choice on the first blocks of a text."""
    tokens = setting.known.case.splits[split][:num_blocks]
    cache = setting.cache() if setting.slots else None
    found = evaluate(setting.known.case.stream, tokens, sparse, cache, reading=reading)
    return {"ppl": found.ppl, "ms": 1e3 * found.flash_s / tokens.size, "token_ms": 1e3 * found.request_s / tokens.size}


def top_k(known: Known, density: float) -> Sparse:
    """Fits top-k at a share of the units that a token may use."""
    selector = topk.Plugin()
    arrays = {
        key: selector.fit(norms.size, known.used * density, {}, topk.Options()) for key, norms in known.norms.items()
    }
    return Sparse(selector, FAMILIES_PRUNED, arrays)


def curves_of(setting: Setting, num_blocks: int) -> dict[str, list[Point]]:
    """Returns the curves of CURVES; top-k's covers TOPK_DENSITIES."""
    half, even = top_k(setting.known, EQUAL_TO[0]), setting.flash.break_even_gap_bytes
    gap = min(
        (share * even for share in GAPS),
        key=lambda gap: point(setting, "validation", num_blocks, half, setting.reading(gap, False))["ms"],
    )
    densities = (*LOW_DENSITIES, *FLASH_DENSITIES) if setting.slots else FLASH_DENSITIES
    choices = {
        TOPK: ([top_k(setting.known, density) for density in TOPK_DENSITIES], setting.reading(gap, False)),
        FLASH: (map(setting.flash_selector, densities), setting.reading(setting.kept_together, True)),
    }
    return {
        name: [point(setting, "test", num_blocks, choice, reading) for choice in found]
        for name, (found, reading) in choices.items()
    }


def compared(setting: Setting, num_blocks: int) -> Iterator[Row]:
    """Yields a row per perplexity: milliseconds of every choice, and of a dense run in the same DRAM."""
    curves = curves_of(setting, num_blocks)

    def at(ppl: float, what: str) -> Row:
        return {name: at_ppl([(point["ppl"], point[what]) for point in curve], ppl) for name, curve in curves.items()}

    for density in EQUAL_TO:
        ppl = curves[TOPK][TOPK_DENSITIES.index(density)]["ppl"]
        row = {"density": density, "ppl": ppl, "dense_token_ms": setting.dense_ms}
        yield row | at(ppl, "ms") | {"token_ms": at(ppl, "token_ms")}


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",),
        smoke=("stories260k",),
        full=("prose7m", "tinystories656k", "stories260k"),
        choices=WITH_MIXTURES,
        help="models to prune",
    )
    devices: tuple[str, ...] = option(("pixel6",), full=("pixel6", "infinix-zero30"), help="device profiles")
    groups: tuple[int, ...] = option((1,), full=(1, 4), help="consecutive layers whose units lie together on flash")
    slots: tuple[float, ...] = option((0.0,), full=(0.0, 1 / 3), help="share of the units in an LRU cache; 0: no cache")
    blocks: int = option(2, smoke=1, full=4, help="blocks of 256 tokens of validation and of test text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].density": "density of top-k whose perplexity the others match",
        "rows[].ppl": "perplexity of top-k at this density",
        "rows[].dense_token_ms": "modelled milliseconds per token of a dense run in the same DRAM",
        **{f"rows[].{name}?": f"milliseconds of reads per token, {name}; null: ppl not reached" for name in CURVES},
        **{f"rows[].token_ms.{name}?": f"milliseconds of reading and computing, {name}" for name in CURVES},
        **{f"median_gain_over_topk{unit}?": f"median of top-k's over flash's ms of {of}" for unit, of in UNITS.items()},
        **{f"worst_gain_over_topk{unit}?": f"least of top-k's over flash's ms of {of}" for unit, of in UNITS.items()},
        **{f"num_gain_over_topk{unit}": f"number of gains in milliseconds of {of}" for unit, of in UNITS.items()},
    }
    needs_data = True
    over = {"model": "models", "device": "devices", "groups": "groups", "slots": "slots"}
    full_minutes = 100

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per perplexity."""
        model = cell["model"]
        known = self.once(model, lambda: known_of(model, self.folder / model))
        setting = Setting(known, load_device(cell["device"]), cell["groups"], cell["slots"])
        yield from compared(setting, self.options.blocks)

    def figures(self, rows: Rows) -> Figures:
        """Returns gains over top-k, where both curves reach the perplexity; `_token` covers whole requests."""
        found: Row = {}
        for unit in UNITS:
            both = [row["token_ms"] if unit else row for row in rows]
            known = [one for one in both if one.get(TOPK) is not None and one.get(FLASH) is not None]
            gained, name = [one[TOPK] / one[FLASH] for one in known], f"gain_over_topk{unit}"
            found |= {f"median_{name}": statistics.median(gained) if gained else None}
            found |= {f"worst_{name}": min(gained, default=None), f"num_{name}": len(gained)}
        return found


if __name__ == "__main__":
    main("flash_selection")
