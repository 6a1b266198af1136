"""Models the first token after a start with nothing in DRAM: loading, then the dense passes that take the prompt.

The runtime's own store reads, on simulated flash: pinned units first, then all units once for each chunk of the prompt,
in a mixture the units of as many experts as a chunk is expected to use (runtime/simulate.py). A pass computes with
units while it reads, as a request does (runtime/store/computing.py); the resident weights of a layer have their turn
between two passes, and the head is for the last token alone. The start of the process itself is not counted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from coldpress.compiler.cost_model import kv_cache_bytes, stored_format, tensor_bytes
from coldpress.compiler.seconds import Key, Setting
from coldpress.runtime.decoder.decoder import PREFILL_CHUNK_TOKENS
from coldpress.runtime.dram.budget import choose_plan, holds_tables, table_bytes
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.simulate import Opening, simulate_opening
from coldpress.runtime.store import resident
from coldpress.runtime.store.computing import (
    Arrival,
    dense_seconds,
    fetch_seconds,
    layer_seconds,
    products_of,
    token_seconds,
    weight_seconds,
)
from coldpress.runtime.store.planner import MAX_READ_BYTES
from coldpress.schemas.device import DeviceProfile, flash_seconds
from coldpress.schemas.families import num_experts
from coldpress.schemas.layout import PartPlan
from coldpress.schemas.model import ModelSpec

DENSE = "dense"
"""The prompt goes through all units, whatever the plan's selector."""
MATRIX_SHARE = 0.5
"""Seconds of a matrix's product with many tokens over those of as many products with one: 0.51 for 128 tokens and 0.40
for 512, int4 on two cores (`benchmarks.prefill` over `benchmarks.kernels`). Profiles have no rate of it."""


class Products(NamedTuple):
    """Number of products with one token that take as long as a chunk of a prompt."""

    least: float
    """A chunk of more than FEW_TOKENS takes no less time than FEW_TOKENS."""
    expected: float
    most: float
    """Matrices are multiplied only where that is faster than products of a few tokens at a time."""


class FirstToken(NamedTuple):
    least_s: float
    expected_s: float
    most_s: float
    load_s: float
    """The part that loading takes, before the prompt's tokens."""


class _Chunk(NamedTuple):
    passes: Mapping[Key, Arrival]
    products: Products
    of_experts: Products


def first_token(setting: Setting, prompt_tokens: int, expert_shares: np.ndarray | None = None) -> FirstToken:
    """Returns the seconds to a prompt's first token. `setting` has the parts of all layers; with room for every unit,
    all are loaded, as in a run. `expert_shares` has the share of tokens that use each expert, float [layers, E]; None
    for equal shares, or without experts."""
    plan = choose_plan(setting.manifest)
    held_bytes = table_bytes(setting.manifest) if holds_tables(setting.manifest, plan) else 0
    setting = replace(setting, plan=plan)
    chunks = [min(PREFILL_CHUNK_TOKENS, prompt_tokens - at) for at in range(0, prompt_tokens, PREFILL_CHUNK_TOKENS)]
    used = [_experts_used(setting.model.spec, chunk, expert_shares) for chunk in chunks]
    openings = {count: _opening(setting, count) for count in dict.fromkeys(map(round, used))}
    opening = next(iter(openings.values()))
    stored_bytes = plan.resident_bytes + plan.predictor_bytes + held_bytes
    flash = setting.device.flash.issuing(plan.queue_depth)
    load_s = opening.load_s + float(flash_seconds(flash, math.ceil(stored_bytes / MAX_READ_BYTES), stored_bytes))
    prompt = [
        _Chunk(
            openings[round(experts)].passes,
            products_of_chunk(setting.device, chunk),
            _products_of_experts(setting, chunk, experts),
        )
        for chunk, experts in zip(chunks, used, strict=True)
    ]
    before_s = load_s + resident.row_seconds(setting.manifest, plan, prompt_tokens)
    least, expected, most = (before_s + _prompt_s(setting, prompt, prompt_tokens, bound) for bound in range(3))
    return FirstToken(least, expected, most, load_s)


def expected_experts(shares: np.ndarray, num_tokens: int) -> float:
    """Returns how many experts of a layer are used by any of `num_tokens` tokens, the mean number over layers if a
    router chooses for each token anew: the sum of 1 - (1 - share)^T over the experts; `shares` is float [layers, E]."""
    return float((1 - (1 - shares) ** num_tokens).sum(axis=1).mean())


def _experts_used(spec: ModelSpec, num_tokens: int, shares: np.ndarray | None) -> float:
    if shares is None:
        shares = np.full((1, spec.num_experts), spec.num_experts_per_tok / spec.num_experts)
    return expected_experts(shares, num_tokens)


def products_of_chunk(device: DeviceProfile, num_tokens: float) -> Products:
    """Returns how many products with one token take as long as a chunk of `num_tokens`; see runtime/kernels."""
    least = products_of(device, min(num_tokens, FEW_TOKENS))
    most = products_of(device, num_tokens)
    return Products(least, most if num_tokens <= FEW_TOKENS else max(least, MATRIX_SHARE * num_tokens), most)


def _products_of_experts(setting: Setting, num_tokens: int, experts_used: float) -> Products:
    """Returns `products_of_chunk` for units of experts, in products of one token with its experts; each expert that the
    chunk uses multiplies only its own tokens."""
    times = experts_used / setting.model.spec.num_experts_per_tok
    return Products(*(times * count for count in products_of_chunk(setting.device, num_tokens / times)))


def _opening(setting: Setting, experts_read: int) -> Opening:
    """Returns the seconds of a session's first reads of units; simulates one layer for all, if all have equal parts."""
    plan, layers = setting.plan, dict[int, list[PartPlan]]()
    units_only = setting.manifest.flash.model_copy(update={"tables": ()})
    manifest = setting.manifest.model_copy(update={"flash": units_only})
    artifact = replace(setting.artifact, manifest=manifest)
    for part in plan.parts:
        layers.setdefault(part.layer, []).append(part)
    first, *others = layers.values()
    formats = setting.manifest.unit_formats
    kinds = {
        tuple((one.family, formats[one.layer, one.family], one.num_pinned, one.cache_slots) for one in parts)
        for parts in layers.values()
    }
    if len(kinds) > 1:
        return simulate_opening(artifact, plan, experts_read)
    sizes = {(section.first_layer, section.family): section.unit_bytes for section in setting.sections}
    held_bytes = sum((part.num_pinned + part.cache_slots) * sizes[part.layer, part.family] for part in first)
    budget = plan.dram_budget_bytes - len(others) * held_bytes  # as much room for buffers as with all layers
    one = plan.model_copy(update={"parts": tuple(first), "dram_budget_bytes": budget})
    found = simulate_opening(artifact, one, experts_read)
    passes = {(layer, part.family): found.passes[first[0].layer, part.family] for layer in layers for part in first}
    return Opening(len(layers) * found.load_s, passes)


def _prompt_s(setting: Setting, chunks: Sequence[_Chunk], prompt_tokens: int, bound: int) -> float:
    device, manifest, spec = setting.device, setting.manifest, setting.model.spec
    kv_cache = kv_cache_bytes(spec, prompt_tokens, setting.plan.kv_cache)
    densely = setting.plan.model_copy(update={"method": DENSE, "kv_cache_bytes": kv_cache})
    computed = resident.computed_bytes(manifest, densely)
    head_bytes = tensor_bytes(spec.head_role, setting.model.tensors[spec.head_role].shape, setting.formats)
    head_s = weight_seconds(device, stored_format(spec.head_role, setting.formats), head_bytes)
    layers_s = dense_seconds(device, computed) - head_s
    calls_s = token_seconds(device) + spec.num_hidden_layers * layer_seconds(device)
    units = resident.chosen_from(manifest)
    total = head_s
    for chunk in chunks:
        total += calls_s + chunk.products[bound] * layers_s
        for key, reads in chunk.passes.items():
            products = chunk.products if num_experts(key[1], spec) == 1 else chunk.of_experts
            used = round(products[bound] * units[key].num_bytes)
            ready, read = (0, used) if reads.num_portions else (used, 0)
            total += fetch_seconds(device, units[key]._replace(num_bytes=used), reads, ready, read, 0)
    return total
