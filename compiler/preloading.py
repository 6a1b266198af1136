"""Whether a build reads ahead (ActiveFlow 3): compared, by the device's law, with reading nothing ahead.

Reads what `order` found that each section's misses cost, what calibration measured of layers' inputs (how many of the
largest are so in the layer before, too), and what is computed between two layers; gives the bytes of the plan's buffer.
A request's reads come behind those that were begun before (runtime/token_time.py); of what is read ahead the wrong part
was read for nothing, and the rest is still read on demand.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compiler.cost_model import kv_cache_bytes, tensor_bytes
from runtime._extents import span_bytes
from runtime.preload import guessed_families
from runtime.token_time import FlashQueue
from schemas.activations import Activations
from schemas.device import DeviceProfile, flash_seconds
from schemas.families import FAMILIES, resident_roles
from schemas.layout import Section
from schemas.model import MLP_ROLES, Model
from schemas.order import Order
from schemas.sparsity import Sparsity

LOG = logging.getLogger(__name__)
WORTH = 0.97
"""Share of the time without it that a token must not exceed: the law may be wrong by that much."""


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


def pays(run: Run) -> bool:
    """Whether a token takes less time with reading ahead; never where nothing says how good the guess is."""
    without_s, with_s = _token_s(run, False), _token_s(run, True)
    LOG.info("layout: a token takes %.3g ms, and %.3g ms with reading ahead", 1000 * without_s, 1000 * with_s)
    return with_s < WORTH * without_s


def precision(run: Run, section: Section, steps: int) -> float:
    """Share of what is guessed for a section, from inputs `steps` layers before its own, that is asked for: 1 where
    everything is, and 0 where nobody knows. What is guessed better than by chance falls off with every step."""
    layers, family = section.layers, section.family
    density = float(np.mean([run.sparsity.density(family, layer) for layer in layers]))
    if density >= 1:
        return 1.0
    if run.activations is None or FAMILIES[family].axis != "hidden_size":
        return 0.0
    found = []
    for layer in layers:
        points = run.activations.layers[layer].top_precision
        if not points:
            return 0.0
        shares = [0.0, *(point.density for point in points), 1.0]
        right = float(np.interp(density, shares, [0.0, *(point.precision for point in points), 1.0]))
        found.append(density + (1 - density) * (max(0.0, right - density) / (1 - density)) ** steps)
    return float(np.mean(found))


def _token_s(run: Run, ahead: bool) -> float:
    """Modelled seconds of a token, without the head."""
    spec, families, bandwidth = run.model.spec, run.sparsity.families, run.device.dram_bytes_per_s.value
    sections = {(layer, section.family): section for section in run.sections for layer in section.layers}
    first_of_mlp = next((name for name in families if set(FAMILIES[name].roles) & set(MLP_ROLES)), None)
    guessed, queue, total_s = guessed_families(families) if ahead else (), FlashQueue(run.device), 0.0
    for layer in range(spec.num_hidden_layers):
        for family in families:
            section = sections[layer, family]
            if family == first_of_mlp:
                between = _bytes_between(run, layer)
                queue.compute(between)
                total_s += between / bandwidth
            right = 0.0
            if family in guessed and section.first_layer:
                right = precision(run, section, len(section.layers))
            flash_s = (1 - right) * _section_s(run, section) / len(section.layers)
            active = run.sparsity.density(family, layer) * section.num_units * section.unit_bytes
            total_s += queue.fetch_s(flash_s, int(active), 0, early=right > 0)
        for family in guessed:
            section = sections[layer, family]
            following = sections.get((section.last_layer + 1, family))
            if following and precision(run, following, len(following.layers)):
                queue.begin(_section_s(run, following) * _share_of_reads(run, following) / len(section.layers))
    return total_s


def _section_s(run: Run, section: Section) -> float:
    """Flash seconds of a token's misses in all layers of a section, each layer's read alone."""
    for entry in (entry for part in run.order for entry in part.entries):
        if (entry.layer, entry.family) == (section.first_layer, section.family):
            return next(
                (cost.flash_s_per_token for cost in entry.gap_costs if cost.gap_bytes == run.gap_bytes),
                entry.flash_s_per_token,
            )
    return 0.0


def _share_of_reads(run: Run, section: Section) -> float:
    """What reading all layers' parts of a unit at once takes, of what each alone takes: lone reads of some units."""
    flash, num_layers = run.device.flash, len(section.layers)
    page_bytes, count = flash.page_bytes.value, flash.queue_depth.value
    at_once = flash_seconds(flash, count, count * span_bytes(section.stride_bytes, page_bytes))
    alone = flash_seconds(flash, count, count * span_bytes(section.unit_bytes, page_bytes))
    return min(1.0, float(at_once / (num_layers * alone)))


def _bytes_between(run: Run, layer: int) -> int:
    """Resident weights and keys and values that a layer computes with before it asks for units of the MLP."""
    spec, sparsity = run.model.spec, run.sparsity
    roles = (f"layers.{layer}.{role}.weight" for role in resident_roles(sparsity.families, spec) if role != "down_proj")
    resident = sum(tensor_bytes(role, run.model.tensors[role].shape, sparsity.format) for role in roles)
    return resident + kv_cache_bytes(spec, sparsity.context_length) // 2 // spec.num_hidden_layers
