"""Decides whether a build preloads (ActiveFlow 3), and how much, by modelled seconds with and without it.

Calibration tokens are decoded on the simulated device (compiler/seconds.py) under the build's own plan, placement and
order. A layer guesses that the next section will use the units that the layer itself uses. Where a plan reads only the
most certain part of a guess, recalibration's measure of how much consecutive layers share gives that part's precision.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from statistics import NormalDist

import numpy as np

from coldpress.compiler import seconds
from coldpress.compiler.activity.held_out import Window
from coldpress.compiler.seconds import WORTH, Key, Setting
from coldpress.compiler.stages.plan._search import FILLING, PlanInputs, filling
from coldpress.runtime.store.preload_room import (
    NOTHING,
    Preloading,
    PreloadReads,
    buffer_bytes,
    guessed_families,
    scattered,
)
from coldpress.runtime.store.resident import seconds_before
from coldpress.runtime.trace import END, FETCH, NO_IDS, PRELOAD, Event
from coldpress.schemas.families import FAMILIES, num_units
from coldpress.schemas.layout import Plan, Section
from coldpress.schemas.sparsity import Sparsity

LOG = logging.getLogger(__name__)
WORTH_IN_GROUPS = 0.95
"""As WORTH for layers in groups, where the law has been off by up to a twentieth (docs/experiments/flash.md)."""
GUESSES = (0.5, 0.75, 1.0)
"""Shares of a guess that are tried: fewer units are more certain; with more units, reads join better."""
WARM_TOKENS, MEASURED_TOKENS = 4, 8
"""The last calibration tokens: the first of them only fill the caches."""
QUANTILES = 64
"""Steps of the integral over a normal distribution's tail in `guess_precision`."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class PreloadInputs:
    known: PlanInputs
    sparsity: Sparsity
    """The choice of the plan's budget."""
    plan: Callable[[Preloading], Plan]
    free_bytes: int
    """DRAM for units and the preload buffer, without pinned units."""

    @property
    def sections(self) -> tuple[Section, ...]:
        return self.known.sections

    def setting(self, preloading: Preloading) -> Setting:
        return self.known.setting(self.plan(preloading))

    @cached_property
    def used(self) -> dict[Key, np.ndarray]:
        """The units that the last tokens use, by layer and family, bool [num_units, tokens]."""
        assert self.known.activations is not None
        stop, spec = self.known.activations.num_tokens, self.known.model.spec
        start = max(0, stop - WARM_TOKENS - MEASURED_TOKENS)
        layers = range(spec.num_hidden_layers)
        found: dict[Key, np.ndarray] = {}
        for trace in self.known.traces(self.sparsity, (Window(start, start, stop),), layers):
            (context,) = trace.contexts
            used = np.zeros((num_units(trace.family, spec), stop - start), bool)
            for token, ids in enumerate(context.ids):
                used[ids, token] = True
            found[trace.layer, trace.family] = used
        return found

    @cached_property
    def following(self) -> dict[Key, tuple[Section, Section]]:
        """The section of a layer and family, and the next section, whose units the layer guesses."""
        return {
            (layer, family): (section, after)
            for family in guessed_families(self.sparsity.families)
            for section, after in pairwise([section for section in self.sections if section.family == family])
            for layer in section.layers
        }


def fitting(run: PreloadInputs, guess: float) -> Preloading:
    """Returns the preload buffer for this share of a guess: as much as flash can read while it would be idle."""
    setting = run.setting(NOTHING)
    device = run.known.device
    idle_s = max(seconds_before(setting.manifest, setting.plan).values(), default=0.0)
    reading = PreloadReads(run.sections, setting.plan.parts, device.flash, setting.plan.collapse_gap_bytes)
    found = buffer_bytes(reading, idle_s, guess, run.free_bytes)
    return Preloading(found, guess) if found else NOTHING


def best(run: PreloadInputs) -> tuple[Preloading, float]:
    """Returns the fastest preloading that fits, and its token time relative to none; `NOTHING` where nothing can be
    preloaded or the quality of guesses was not measured."""
    tried = [preloading for guess in GUESSES if (preloading := fitting(run, guess)).buffer_bytes]
    known = any(_shared(run, section) for section in run.sections[1:])
    if not tried or not known:
        return NOTHING, 1.0
    without_s = token_s(run, NOTHING)
    with_s = {preloading: token_s(run, preloading) for preloading in tried}
    found = min(tried, key=lambda preloading: (with_s[preloading], preloading.buffer_bytes))
    LOG.info("plan: a token takes %.3g ms, and %.3g ms with preloading", 1e3 * without_s, 1e3 * with_s[found])
    return found, with_s[found] / without_s if without_s else 1.0


def worth(sections: Sequence[Section]) -> float:
    """Returns the share of the time without preloading that a token must stay below for `preload=auto`."""
    return WORTH_IN_GROUPS if any(len(section.layers) > 1 for section in sections) else WORTH


def token_s(run: PreloadInputs, preloading: Preloading) -> float:
    setting = run.setting(preloading)
    num_tokens = next(iter(run.used.values())).shape[1]
    num_warm = max(0, min(WARM_TOKENS, num_tokens - 1))
    tokens = [_token(run, setting, preloading, token, 1 + FILLING + token) for token in range(num_tokens)]
    before = [*filling(setting), *chain(*tokens[:num_warm])]
    return seconds.token_seconds(setting, list(chain(*tokens[num_warm:])), before)


def _token(run: PreloadInputs, setting: Setting, preloading: Preloading, token: int, number: int) -> list[Event]:
    """Lists the requests of a token, the `number`th of the run, and what each layer preloads after its own units."""
    found: list[Event] = []
    for layer in range(run.known.model.spec.num_hidden_layers):
        for family in (family for family in run.sparsity.families if (layer, family) in run.used):
            ids = np.flatnonzero(run.used[layer, family][:, token]).astype(np.int32)
            found.append(Event(FETCH, number, layer, family, ids))
        for family in run.sparsity.families if preloading.buffer_bytes else ():
            if (layer, family) in run.following:
                section, after = run.following[layer, family]
                ids = _guessed(run, layer, after, preloading.guess, token)
                positions = np.argsort(setting.artifact.order(after))[ids]
                turn = positions * len(section.layers) // after.num_units == layer - section.first_layer
                found.append(Event(PRELOAD, number, after.first_layer, family, ids[turn]))
    return [*found, Event(END, number, 0, run.sections[0].family, NO_IDS)]


def _guessed(run: PreloadInputs, layer: int, after: Section, guess: float, token: int) -> np.ndarray:
    """Returns the most certain share of a layer's units, int32 ascending; which of them are right is drawn."""
    ids = np.flatnonzero(run.used[layer, after.family][:, token]).astype(np.int32)
    count = max(1, math.ceil(guess * ids.size))
    if count >= ids.size:
        return ids
    right = run.used[after.first_layer, after.family][ids, token]
    share = guess_precision(_shared(run, after), run.sparsity.density(after.family, after.first_layer), guess)
    drawn = ids[np.argsort(scattered(ids.size, token), kind="stable")]
    is_right = np.isin(drawn, ids[right])
    num_right = max(min(round(share * count), int(right.sum())), count - int((~right).sum()))
    return np.sort(np.concatenate([drawn[is_right][:num_right], drawn[~is_right][: count - num_right]]))


def _shared(run: PreloadInputs, section: Section) -> float:
    """Returns the mean share of the units of a section's layers that the layer before uses too; 0 if not measured."""
    if run.known.activations is None or section.family not in guessed_families(run.sparsity.families):
        return 0.0
    if FAMILIES[section.family].axis != "hidden_size" or not section.first_layer:
        return 0.0
    found = [run.known.activations.layers[layer].family(section.family) for layer in section.layers]
    shares = [entry.in_layer_before for entry in found if entry and entry.in_layer_before is not None]
    return float(np.mean(shares)) if shares else 0.0


@lru_cache(maxsize=4096)
def guess_precision(overlap: float, density: float, guess: float) -> float:
    """Returns the expected precision of a guess, if the inputs of two layers are jointly normal. The guess is the share
    `guess` of the earlier layer's units that has the largest entries. `overlap`: share of a layer's units that the
    layer before uses, too; 0 if unknown. `density`: share of all units that a layer uses."""
    if density >= 1 or overlap >= 1:
        return 1.0
    if overlap <= density:  # no more than by chance; 0 (unknown) counts as never right
        return overlap and density
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _both(middle, density, density) < overlap else (low, middle)
    return _both(low, density, guess * density)


def _both(cosine: float, density: float, most_certain: float) -> float:
    """Returns P(|y| in the largest `density` given |x| in the largest `most_certain`), x and y standard normal."""
    least, spread = NORMAL.inv_cdf(1 - density / 2), max(1e-9, (1 - cosine**2) ** 0.5)
    total = 0.0
    for step in range(QUANTILES):
        x = NORMAL.inv_cdf(1 - most_certain * (step + 0.5) / QUANTILES / 2)
        below = NORMAL.cdf((least - cosine * x) / spread) - NORMAL.cdf((-least - cosine * x) / spread)
        total += 1 - below
    return total / QUANTILES
