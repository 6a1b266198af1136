"""Whether a build reads ahead (ActiveFlow 3), and how much: runs with and without it, compared in modelled seconds.

Calibration tokens are decoded on the simulated device (compiler/seconds.py) under the build's own plan, placement and
order. A layer guesses the units of the next section that it uses itself. Where a plan reads only the most certain part
of a guess, recalibration's measure of how much consecutive layers share says how many of that part are right.
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
from coldpress.compiler.activity.counted import counted
from coldpress.compiler.io import load_arrays
from coldpress.compiler.seconds import Key, Setting
from coldpress.runtime.store.ahead_room import NOTHING, Ahead, Reading, buffer_bytes, guessed_families, scattered
from coldpress.runtime.store.clock import bytes_before
from coldpress.runtime.trace import END, FETCH, NO_IDS, PRELOAD, RESET, Event
from coldpress.schemas.activations import Activations
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FAMILIES
from coldpress.schemas.layout import Plan, Section
from coldpress.schemas.model import Model
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.sparsity import Sparsity

LOG = logging.getLogger(__name__)
WORTH = 0.985
"""Share of the time without it that a token must not exceed: another text is not the calibration text."""
WORTH_IN_GROUPS = 0.95
"""The same where layers are in groups: there the law has been off by up to a twentieth (EXPERIMENTS.md)."""
GUESSES = (0.5, 0.75, 1.0)
"""Shares of a guess that are tried: fewer units are more certain, and more units let reads be joined."""
FILLING = 8
"""Requests that bring all units of a part once, so that caches are full; those that deserve DRAM most come last."""
WARM_TOKENS, MEASURED_TOKENS = 4, 8
"""The last calibration tokens: the first of them only bring caches up to date."""
QUANTILES = 64
"""Of a normal distribution's tail, over which the likeness of two layers is integrated."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class Run:
    """What decides how long a token takes."""

    model: Model
    sparsity: Sparsity
    placement: Placement
    sections: tuple[Section, ...]
    order: Sequence[Order]
    device: DeviceProfile
    activations: Activations | None
    plan: Callable[[Ahead], Plan]
    """The build's plan if it reads so much ahead."""
    free_bytes: int
    """DRAM for units and the preload buffer, without pinned units."""

    def setting(self, ahead: Ahead) -> Setting:
        """The build on its device."""
        return Setting(
            self.model, self.sparsity.format, self.device, self.sections, self.plan(ahead), self._orders, self._ranks
        )

    @cached_property
    def _orders(self) -> dict[Key, np.ndarray]:
        entries = (entry for part in self.order for entry in part.entries)
        return {(entry.layer, entry.family): load_arrays(entry.arrays, "order")["order"] for entry in entries}

    @cached_property
    def _ranks(self) -> dict[Key, np.ndarray]:
        found = load_arrays(self.placement.arrays)
        return {
            (layer, section.family): found[f"rank.{layer}.{section.family}"]
            for section in self.sections
            for layer in section.layers
        }

    @cached_property
    def used(self) -> dict[Key, np.ndarray]:
        """By layer and family, the units that the last tokens use, bool [num_units, tokens]."""
        assert self.activations is not None
        count = min(self.activations.num_tokens, WARM_TOKENS + MEASURED_TOKENS)
        found: dict[Key, np.ndarray] = {}
        for layer in range(self.model.spec.num_hidden_layers):
            for section in (some for some in self.sections if layer in some.layers):
                key = layer, section.family
                if self.sparsity.density(section.family, layer) >= 1:
                    found[key] = np.ones((section.num_units, count), bool)
                    continue
                bits = load_arrays(counted(self.activations, layer, section.family).arrays, "bits")["bits"]
                first = (self.activations.num_tokens - count) // 8
                active = np.unpackbits(
                    bits[:, first:], axis=1, count=self.activations.num_tokens - 8 * first, bitorder="little"
                )
                found[key] = active[:, -count:].astype(bool)
        return found

    @cached_property
    def following(self) -> dict[Key, tuple[Section, Section]]:
        """By layer and family, its section and the next one, whose units it guesses."""
        return {
            (layer, family): (section, after)
            for family in guessed_families(self.sparsity.families)
            for section, after in pairwise([section for section in self.sections if section.family == family])
            for layer in section.layers
        }


def fitting(run: Run, guess: float) -> Ahead:
    """What is read ahead of such a share of a guess: as much as flash reads while nothing is asked for."""
    setting = run.setting(NOTHING)
    idle_s = max(bytes_before(setting.manifest, setting.plan).values(), default=0) / run.device.dram_bytes_per_s.value
    reading = Reading(run.sections, setting.plan.parts, run.device.flash, setting.plan.collapse_gap_bytes)
    found = buffer_bytes(reading, idle_s, guess, run.free_bytes)
    return Ahead(found, guess) if found else NOTHING


def best(run: Run) -> tuple[Ahead, float]:
    """The fastest reading ahead of those that fit, and its token's time over that without it; `NOTHING` where nothing
    can be read ahead, or nobody measured how good a guess is."""
    tried = [ahead for guess in GUESSES if (ahead := fitting(run, guess)).buffer_bytes]
    known = any(_shared(run, section) for section in run.sections[1:])
    if not tried or not known:
        return NOTHING, 1.0
    without_s = token_s(run, NOTHING)
    with_s = {ahead: token_s(run, ahead) for ahead in tried}
    found = min(tried, key=lambda ahead: (with_s[ahead], ahead.buffer_bytes))
    LOG.info("layout: a token takes %.3g ms, and %.3g ms with reading ahead", 1e3 * without_s, 1e3 * with_s[found])
    return found, with_s[found] / without_s if without_s else 1.0


def chosen(run: Run) -> Ahead:
    """What is read ahead where that is left to the law: nothing where it does not pay."""
    found, share = best(run)
    return found if share < worth(run.sections) else NOTHING


def worth(sections: Sequence[Section]) -> float:
    """Share of the time without reading ahead that a token must not exceed."""
    return WORTH_IN_GROUPS if any(len(section.layers) > 1 for section in sections) else WORTH


def token_s(run: Run, ahead: Ahead) -> float:
    """Modelled seconds of a token."""
    setting = run.setting(ahead)
    num_tokens = next(iter(run.used.values())).shape[1]
    num_warm = max(0, min(WARM_TOKENS, num_tokens - 1))
    tokens = [_token(run, setting, ahead, token, 1 + FILLING + token) for token in range(num_tokens)]
    before = [*_filling(run, setting), *chain(*tokens[:num_warm])]
    return seconds.token_seconds(setting, list(chain(*tokens[num_warm:])), before)


def _filling(run: Run, setting: Setting) -> list[Event]:
    """Requests for all units, as of tokens from 1 on, and then a new context."""
    found: list[Event] = []
    for number in range(FILLING):
        for layer, family in _parts(run):
            rank = setting.artifact.rank(layer, family)[::-1]
            ids = np.sort(np.array_split(rank, FILLING)[number]).astype(np.int32)
            found.append(Event(FETCH, number + 1, layer, family, ids))
        found.append(Event(END, number + 1, 0, run.sections[0].family, NO_IDS))
    return [*found, Event(RESET, 0, 0, run.sections[0].family, NO_IDS)]


def _token(run: Run, setting: Setting, ahead: Ahead, token: int, number: int) -> list[Event]:
    """The requests of a token, the `number`th of the run, and what each layer reads ahead when it has its own units."""
    found: list[Event] = []
    for layer in range(run.model.spec.num_hidden_layers):
        for family in run.sparsity.families:
            ids = np.flatnonzero(run.used[layer, family][:, token]).astype(np.int32)
            found.append(Event(FETCH, number, layer, family, ids))
        for family in run.sparsity.families if ahead.buffer_bytes else ():
            if (layer, family) in run.following:
                section, after = run.following[layer, family]
                ids = _guessed(run, layer, after, ahead.guess, token)
                positions = np.argsort(setting.artifact.order(after))[ids]
                turn = positions * len(section.layers) // after.num_units == layer - section.first_layer
                found.append(Event(PRELOAD, number, after.first_layer, family, ids[turn]))
    return [*found, Event(END, number, 0, run.sections[0].family, NO_IDS)]


def _parts(run: Run) -> list[Key]:
    layers = range(run.model.spec.num_hidden_layers)
    return [(layer, family) for layer in layers for family in run.sparsity.families]


def _guessed(run: Run, layer: int, after: Section, guess: float, token: int) -> np.ndarray:
    """The most certain share of a layer's own units, int32 ascending: as many of them as `right_share` says are used in
    the first layer of the section `after`. Which ones is drawn."""
    ids = np.flatnonzero(run.used[layer, after.family][:, token]).astype(np.int32)
    count = max(1, math.ceil(guess * ids.size))
    if count >= ids.size:
        return ids
    right = run.used[after.first_layer, after.family][ids, token]
    share = right_share(_shared(run, after), run.sparsity.density(after.family, after.first_layer), guess)
    drawn = ids[np.argsort(scattered(ids.size, token), kind="stable")]
    is_right = np.isin(drawn, ids[right])
    num_right = max(min(round(share * count), int(right.sum())), count - int((~right).sum()))
    return np.sort(np.concatenate([drawn[is_right][:num_right], drawn[~is_right][: count - num_right]]))


def _shared(run: Run, section: Section) -> float:
    """Share of the units that a token uses of a section's layers that it uses in the layer before each, too; 0 where
    nobody measured it."""
    if run.activations is None or section.family not in guessed_families(run.sparsity.families):
        return 0.0
    if FAMILIES[section.family].axis != "hidden_size" or not section.first_layer:
        return 0.0
    found = [run.activations.layers[layer].family(section.family) for layer in section.layers]
    shares = [entry.in_layer_before for entry in found if entry and entry.in_layer_before is not None]
    return float(np.mean(shares)) if shares else 0.0


@lru_cache(maxsize=4096)
def right_share(alike: float, density: float, guess: float, steps: int = 1) -> float:
    """Share of a guess's surest units that are used, as if two layers' inputs were normal and as alike as measured.

    Args:
        alike: Of what one layer uses, what the layer before uses, too; 0 where nobody knows.
        density: What a layer uses, of all units.
        guess: Which of the units that the earlier layer uses are read: those with the largest entries.
        steps: Layers from the one to the other; likeness falls off with every one.
    """
    if density >= 1 or alike >= 1:
        return 1.0
    if alike <= density:  # by chance
        return alike and density
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _both(middle, density, density) < alike else (low, middle)
    return _both(low**steps, density, guess * density)


def _both(cosine: float, density: float, surest: float) -> float:
    """Chance that |y| is of the largest `density` where |x| is of the largest `surest`, x and y standard normal."""
    least, spread = NORMAL.inv_cdf(1 - density / 2), max(1e-9, (1 - cosine**2) ** 0.5)
    total = 0.0
    for step in range(QUANTILES):
        x = NORMAL.inv_cdf(1 - surest * (step + 0.5) / QUANTILES / 2)
        below = NORMAL.cdf((least - cosine * x) / spread) - NORMAL.cdf((-least - cosine * x) / spread)
        total += 1 - below
    return total / QUANTILES
