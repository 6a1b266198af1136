"""Whether a build reads ahead (ActiveFlow 3), and how much: compared, by the device's law, with reading nothing ahead.

Reads what `order` found that each section's misses cost, what recalibration measured of how much a layer chooses that
the layer before chose, too, and what is computed between two layers; gives the plan's buffer and how much of a guess it
reads. Requests are drawn that are as dense, as alike and as little in DRAM as those of the build, and the runtime's own
planner says which reads bring what was not read ahead: what that takes of the time of all of it is what is left of
`order`'s seconds. A request's reads come behind those that were begun before (runtime/store/clock.py).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np

from coldpress.compiler.cost_model import kv_cache_bytes, tensor_bytes
from coldpress.runtime.store import planner
from coldpress.runtime.store.ahead_room import (
    NOTHING,
    Ahead,
    Reading,
    buffer_bytes,
    divided,
    guessed_families,
    rooms,
    scattered,
)
from coldpress.runtime.store.clock import FlashQueue
from coldpress.schemas.activations import Activations
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FAMILIES, WHOLE_MLP, FamilyName, resident_roles, used_share
from coldpress.schemas.layout import PartPlan, Section
from coldpress.schemas.model import MLP_ROLES, Model, matrices
from coldpress.schemas.order import Order
from coldpress.schemas.sparsity import Sparsity

LOG = logging.getLogger(__name__)
WORTH = 0.985
"""Share of the time without it that a token must not exceed: requests that are drawn are not those of a text."""
WORTH_IN_GROUPS = 0.95
"""The same where layers are in groups: there the law has been off by up to a twentieth (EXPERIMENTS.md)."""
GUESSES = (0.5, 0.75, 1.0)
"""Shares of a guess that are tried: fewer units are surer, and more of them let reads be joined."""
QUANTILES = 64
"""Of a normal distribution's tail, where the likeness of two layers is integrated."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class Run:
    """What decides how long a token takes."""

    model: Model
    sparsity: Sparsity
    sections: Sequence[Section]
    order: Sequence[Order]
    gap_bytes: int
    device: DeviceProfile
    activations: Activations | None
    parts: Callable[[int], tuple[PartPlan, ...]]
    """The plan's parts under a preload buffer of so many bytes."""
    free_bytes: int
    """DRAM for units and that buffer, but for what is pinned."""

    def reading(self, buffer: int) -> Reading:
        """How units are read beside a preload buffer."""
        return Reading(self.sections, self.parts(buffer), self.device.flash, self.gap_bytes)

    @cached_property
    def section_of(self) -> dict[tuple[int, FamilyName], Section]:
        """By layer and family."""
        return {(layer, section.family): section for section in self.sections for layer in section.layers}

    @cached_property
    def flash_s(self) -> dict[tuple[int, FamilyName], float]:
        """Flash seconds of a token's misses in one layer, by the first layer of its section, without reading ahead."""
        return {
            (entry.layer, entry.family): next(
                (cost.flash_s_per_token for cost in entry.gap_costs if cost.gap_bytes == self.gap_bytes),
                entry.flash_s_per_token,
            )
            / entry.num_layers
            for part in self.order
            for entry in part.entries
        }


def fitting(run: Run, guess: float) -> Ahead:
    """What is read ahead where so much of a guess is: as much as flash reads while nothing is asked for."""
    idle_s = max(_bytes_between(run, layer) for layer in range(run.model.spec.num_hidden_layers))
    found = buffer_bytes(run.reading(0), idle_s / run.device.dram_bytes_per_s.value, guess, run.free_bytes)
    return Ahead(found, guess) if found else NOTHING


def best(run: Run) -> tuple[Ahead, float]:
    """What takes a token the least time of what fits, and the share of the time without it that it then takes; nothing
    where nothing can be read ahead, or nobody knows how good the guess is."""
    tried = [ahead for guess in GUESSES if (ahead := fitting(run, guess)).buffer_bytes]
    known = any(_alike(run, section) for section in run.sections[1:])
    if not tried or not known:
        return NOTHING, 1.0
    without_s = token_s(run, NOTHING)
    found = min(tried, key=lambda ahead: (token_s(run, ahead), ahead.buffer_bytes))
    with_s = token_s(run, found)
    LOG.info("layout: a token takes %.3g ms, and %.3g ms with reading ahead", 1000 * without_s, 1000 * with_s)
    return found, with_s / without_s if without_s else 1.0


def chosen(run: Run) -> Ahead:
    """What is read ahead where that is left to the law: nothing where it does not pay."""
    found, share = best(run)
    return found if share < worth(run.sections) else NOTHING


def worth(sections: Sequence[Section]) -> float:
    """Share of the time without reading ahead that a token must not exceed."""
    return WORTH_IN_GROUPS if any(len(section.layers) > 1 for section in sections) else WORTH


def token_s(run: Run, ahead: Ahead) -> float:
    """Modelled seconds of a token, without the head."""
    spec, families, bandwidth = run.model.spec, run.sparsity.families, run.device.dram_bytes_per_s.value
    first_of_mlp = next((name for name in families if set(FAMILIES[name].roles) & set(MLP_ROLES)), None)
    queue, total_s = FlashQueue(run.device), 0.0
    drawn = {(section.first_layer, section.family): _drawn(run, section, ahead) for section in run.sections}
    for layer in range(spec.num_hidden_layers):
        for family in families:
            section = run.section_of[layer, family]
            if family == first_of_mlp:
                between = _bytes_between(run, layer)
                queue.compute(between)
                total_s += between / bandwidth
            found = drawn[section.first_layer, family]
            active = run.sparsity.density(family, layer) * section.num_units * section.unit_bytes
            flash_s = found.left[layer - section.first_layer] * run.flash_s.get((section.first_layer, family), 0.0)
            total_s += queue.fetch_s(flash_s, int(active), 0, early=found.ahead_s > 0)
        for family in families:
            section = run.section_of[layer, family]
            following = drawn.get((section.last_layer + 1, family))
            queue.begin(following.ahead_s / len(section.layers) if following else 0.0)
    return total_s


@dataclass(frozen=True)
class Drawn:
    """Requests for a section."""

    ahead_s: float
    """Seconds of what is read ahead of them."""
    left: tuple[float, ...]
    """Seconds of what is read then, over those of everything with nothing read ahead, by layer."""


def _drawn(run: Run, section: Section, ahead: Ahead) -> Drawn:
    """Of the units that a token guesses, `right_share` are among those that it uses; where they lie is drawn, too."""
    before, reading = run.reading(0), run.reading(ahead.buffer_bytes)
    num_units, num_layers = section.num_units, len(section.layers)
    room, right = _room(run, section, ahead), 0.0
    density = float(np.mean([reading.density[layer, section.family] for layer in section.layers]))
    guessed = np.zeros(num_units, bool)
    if room and section.first_layer:
        right = right_share(_alike(run, section), density, ahead.guess, num_layers)
        guessed = scattered(num_units, 0) < ahead.guess * density * (right > 0)
    others = max(0.0, density - ahead.guess * density * right) / max(1e-9, 1 - ahead.guess * density)
    asked, held = [], []
    for layer in section.layers:
        asked.append(scattered(num_units, 1 + layer) < np.where(guessed, right, others if guessed.any() else density))
        held.append(scattered(num_units, 1001 + layer))
    missing = [there >= reading.held[layer, section.family] for layer, there in zip(section.layers, held, strict=True)]
    ahead_s, taken = _read_ahead(reading, section, [guessed & absent for absent in missing], room)
    left = []
    for index, layer in enumerate(section.layers):
        units = planner.Strided(section.part_offset_bytes(layer), section.unit_bytes, section.stride_bytes)
        wanted = asked[index] & (held[index] >= before.held[layer, section.family])
        rest = asked[index] & missing[index] & ~taken[index]
        whole_s, rest_s = (
            found.read_s(found.plan(units, np.flatnonzero(some)).extents)
            for found, some in ((before, wanted), (reading, rest))
        )
        left.append(rest_s / whole_s if whole_s else 0.0)
    return Drawn(ahead_s, tuple(left))


def _read_ahead(
    reading: Reading, section: Section, wanted: Sequence[np.ndarray], room: int
) -> tuple[float, list[np.ndarray]]:
    """Seconds of the reads for `wanted`, bool [num_units] of each layer, as far as there is room, and what they bring,
    alike."""
    num_layers = len(section.layers)
    places = np.flatnonzero(np.stack(wanted, axis=1))
    taken = np.zeros(section.num_units * num_layers, bool)
    seconds = 0.0
    if places.size and room:
        units = planner.Strided(section.offset_bytes, section.unit_bytes, section.unit_bytes)
        batch = next(planner.batches(reading.plan(units, places, room), room))
        taken[places[: batch.buffer_offset.size]] = True
        seconds = reading.read_s(batch.extents)
    return seconds, list(taken.reshape(-1, num_layers).T)


def _room(run: Run, section: Section, ahead: Ahead) -> int:
    """Bytes that a guess for `section` may take."""
    if not ahead.buffer_bytes:
        return 0
    page_bytes = run.device.flash.page_bytes.value
    found = rooms(run.sections, run.parts(ahead.buffer_bytes), page_bytes)
    return divided(found, ahead.buffer_bytes, page_bytes).get(section.family, 0)


def _alike(run: Run, section: Section) -> float:
    """Share of what a token uses of a section's layers that it uses in the layer before each, too; 0 where nobody
    knows."""
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


def _bytes_between(run: Run, layer: int) -> int:
    """Resident weights and keys and values that a layer computes with before it asks for units of the MLP."""
    spec, sparsity, resident = run.model.spec, run.sparsity, 0
    for role in resident_roles(sparsity.families, spec):
        names = [f"layers.{layer}.{name}.weight" for name in matrices(role, spec) if role != "down_proj"]
        held = sum(tensor_bytes(name, run.model.tensors[name].shape, sparsity.format) for name in names)
        resident += round(used_share(WHOLE_MLP, spec) * held) if role in MLP_ROLES else held
    kv_cache = kv_cache_bytes(spec, sparsity.context_length, sparsity.kv_cache)
    return resident + kv_cache // 2 // spec.num_hidden_layers
