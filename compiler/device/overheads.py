"""Measures what surrounds the products: the fixed seconds of a request, a layer and a token, and of a portion of reads.

Tiny models without files, whose weights are random, decode, so that their products take no time. Decoder, selector and
store are the runtime's.

The models of `call_costs` differ in their number of layers, in the requests of a layer, and in whether requests hit the
cache, so that differences between their tokens give each cost. Flash is simulated. Processor time is measured, because
other work on the machine lengthens wall time.

A portion's cost lasts from the wait for it to the beginning of the next one. A dense model decodes from a real file and
keeps no unit in DRAM. It reads the same bytes once in few portions and once in many. Threads sleep and wake, and the
processor idles, as in any run that reads: neither simulated flash nor reads that follow each other show that. The cost
is the one by which the law gives the measured difference.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coldpress.compiler.checkpoint.shapes import Shape, Shapes
from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.device import host
from coldpress.compiler.seconds import Reading, Setting
from coldpress.compiler.sections import make_sections
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.dram.kv_cache import kv_cache_bytes
from coldpress.runtime.flash import Flash, direct, simulated
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.store.computing import Arrival, Weights, fetch_seconds
from coldpress.runtime.store.planner import Strided
from coldpress.runtime.store.store import Store
from coldpress.schemas.compute import Figure
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import WHOLE_MLP, FamilyName, FormatName
from coldpress.schemas.layout import PartPlan, Plan
from coldpress.schemas.model import ATTENTION_ROLES, MLP_ROLES, ModelSpec, role_shape

FORMAT: FormatName = "int8_group32"
CONTEXT_TOKENS = 64
FEW_LAYERS, MANY_LAYERS = 2, 12
ROUNDS = 15
CALL_TOKENS, PORTION_TOKENS = 10, 4
TWO: tuple[FamilyName, ...] = ("mlp_in", "mlp_mid")
FOUR: tuple[FamilyName, ...] = ("attn_in", "attn_out", *TWO)
"""The families of a layer; each is one request."""
FEW_BUFFER_BYTES, MANY_BUFFER_BYTES = 2 << 20, 256 << 10
"""Read buffers, of two halves each: a layer's units arrive in 2 portions, and in 16."""
FILE_BYTES = 8 << 20
COSTS_S = np.linspace(0.0, 2e-3, 401)
"""Costs of a portion that are tried."""


def gated_model(num_layers: int, hidden_size: int = 64, intermediate_size: int = 128) -> Shapes:
    spec = ModelSpec(
        model_type="llama",
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden_size // 4,
        max_position_embeddings=CONTEXT_TOKENS,
        hidden_act="silu",
        gated_mlp=True,
        norm="rms_norm",
        norm_eps=1e-5,
        position="rotary",
        rotary_dim=hidden_size // 4,
        tie_word_embeddings=True,
    )
    of_layer = [*ATTENTION_ROLES, *MLP_ROLES, "input_layernorm", "post_attention_layernorm"]
    roles = [f"layers.{layer}.{name}.weight" for layer in range(num_layers) for name in of_layer]
    shapes = {role: Shape(role_shape(spec, role)) for role in ("embed_tokens.weight", *roles, "norm.weight")}
    return Shapes(spec, shapes)


@dataclass(frozen=True, eq=False)
class InMemory(Artifact):
    """An artifact whose resident tensors are random, and in no file."""

    flash_file: int | None = None
    """Descriptor of the file that is read as flash.img, if one is."""

    @cached_property
    def resident(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        found: dict[str, np.ndarray] = {}
        for tensor in self.manifest.resident:
            values = rng.standard_normal(tensor.shape).astype(np.float32) / 8
            if tensor.format is not None:
                values = load("coldpress.runtime.quantization", Format, tensor.format).encode(values)
            found[tensor.role] = values
        return found

    def selector_arrays(self, plan: Plan, layer: int, family: FamilyName) -> None:
        """See `Artifact`; the selector is fitted to densities."""

    def reading(self, flash_file: int, page_crc32c: np.ndarray) -> "InMemory":
        """Returns the same artifact with a file of random bytes as flash.img: an open descriptor, and the checksum of
        each page, uint32 [pages]."""
        return replace(self, flash_file=flash_file, tables={**self.tables, "page_crc32c": page_crc32c})

    def open(self, name: str, flags: int = 0) -> int:
        assert self.flash_file is not None
        return os.dup(self.flash_file)


def decoder(artifact: InMemory, flash: Flash) -> Decoder:
    plan = artifact.manifest.plans[0]
    found = Decoder(artifact, Store(artifact, plan, flash), Selection(artifact, plan))
    found.begin(CONTEXT_TOKENS)
    found.prefill(np.arange(4))
    return found


def measured_token_s(found: Decoder, num_tokens: int, clock: Callable[[], float]) -> float:
    """Returns the mean seconds of a token by `clock`, each at the same place of the context."""
    length = found.length
    start = clock()
    for token in range(num_tokens):
        found.decode(token)
        found.roll_back(length)
    return (clock() - start) / num_tokens


def in_memory(
    model: Shapes,
    device: DeviceProfile,
    families: tuple[FamilyName, ...],
    density: float,
    slots: float | None,
    **changes: Any,
) -> InMemory:
    """Returns an artifact with one plan, whose sections all have this density; `slots` is the share of their units that
    caches have slots for, None for all units in DRAM."""
    sections = make_sections(model.spec, families, FORMAT)
    plan: dict[str, Any] = {
        "name": "measured",
        "dram_budget_bytes": device.dram_bytes.value,
        "context_length": CONTEXT_TOKENS,
        "resident_bytes": 0,
        "predictor_bytes": 0,
        "kv_cache_bytes": kv_cache_bytes(model.spec, CONTEXT_TOKENS),
        "collapse_gap_bytes": 0,
        "queue_depth": device.flash.queue_depth.value,
        "parts": tuple(
            PartPlan(
                layer=section.first_layer,
                family=section.family,
                density=density,
                num_pinned=section.num_units if slots is None else 0,
                cache_slots=0 if slots is None else round(slots * section.num_units),
            )
            for section in sections
        ),
    }
    return InMemory(**vars(Setting(model, FORMAT, device, sections, Plan(**plan | changes)).artifact))


def call_costs(device: DeviceProfile) -> tuple[dict[str, float], float]:
    """Returns (the fixed seconds of `Compute` on this machine, processor time: medians of several rounds; the largest
    spread between rounds). `device` gives pages and queue depth of the simulated flash."""
    cases: dict[str, Decoder] = {
        "few layers": _on_simulated_flash(device, FEW_LAYERS, TWO),
        "many layers": _on_simulated_flash(device, MANY_LAYERS, TWO),
        "requests": _on_simulated_flash(device, MANY_LAYERS, FOUR),
        "reads": _on_simulated_flash(device, MANY_LAYERS, TWO, slots=1 / 8),
    }
    with np.errstate(all="ignore"):
        rounds = [
            {name: measured_token_s(each, CALL_TOKENS, time.thread_time) for name, each in cases.items()}
            for _ in range(ROUNDS + 1)
        ][1:]
    samples = {name: [found[name] for found in rounds] for name in cases}
    token_s = {name: statistics.median(each) for name, each in samples.items()}
    more = {name: token_s[name] - token_s["many layers"] for name in ("requests", "reads")}
    request_s = more["requests"] / (MANY_LAYERS * (len(FOUR) - len(TWO)))
    layer_s = (token_s["many layers"] - token_s["few layers"]) / (MANY_LAYERS - FEW_LAYERS)
    costs = {
        "request_s": request_s,
        "reading_s": more["reads"] / (MANY_LAYERS * len(TWO)),
        "layer_s": layer_s - len(TWO) * request_s,
        "token_s": token_s["few layers"] - FEW_LAYERS * layer_s,
    }
    spread = max((max(each) - min(each)) / statistics.median(each) for each in samples.values())
    return {name: max(0.0, seconds) for name, seconds in costs.items()}, spread


def _on_simulated_flash(
    device: DeviceProfile, num_layers: int, families: tuple[FamilyName, ...], slots: float | None = None
) -> Decoder:
    """Returns a decoder whose cache holds `slots` of the units, or that has all units in DRAM (None)."""
    artifact = in_memory(
        gated_model(num_layers),
        device,
        families,
        0.5,
        slots,
        method="topk",
        options={"attention": families == FOUR},
        cache="static" if slots is None else "lru",
        read_buffer_bytes=64 * device.flash.page_bytes.value,
    )
    return decoder(artifact, simulated.Plugin(artifact, device.flash.queue_depth.value))


NUM_LAYERS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 4, 256, 2048
MODEL = gated_model(NUM_LAYERS, HIDDEN_SIZE, INTERMEDIATE_SIZE)
UNIT_BYTES = unit_bytes(WHOLE_MLP, MODEL.spec, FORMAT)


def portion_cost(device: DeviceProfile, folder: Path) -> float:
    """Returns the seconds of a portion on this machine, by the medians of several rounds; `folder` is on the storage of
    artifacts. Raises ColdpressError as `host.sample`."""
    with host.sample(folder, FILE_BYTES) as reader, np.errstate(all="ignore"):
        few, many = (_from_file(device, reader, size) for size in (FEW_BUFFER_BYTES, MANY_BUFFER_BYTES))
        rounds = [
            [measured_token_s(each, PORTION_TOKENS, time.perf_counter) for each in (few, many)]
            for _ in range(ROUNDS + 1)
        ]
    few_s, many_s = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
    return cost_of(device, many_s - few_s)


def cost_of(device: DeviceProfile, difference_s: float) -> float:
    """Returns the cost of a portion, if a token takes `difference_s` more with many portions than with few."""
    units, sizes = Strided(0, UNIT_BYTES, UNIT_BYTES), (FEW_BUFFER_BYTES, MANY_BUFFER_BYTES)
    few, many = (Reading(device.flash, units, 0, size).reads(np.arange(INTERMEDIATE_SIZE)).arrival for size in sizes)
    modelled = [
        NUM_LAYERS * (_request_s(device, cost, many) - _request_s(device, cost, few)) for cost in COSTS_S.tolist()
    ]
    return float(np.interp(difference_s, modelled, COSTS_S))


def _from_file(device: DeviceProfile, reader: host.Reader, buffer_bytes: int) -> Decoder:
    plan = {"method": "dense", "cache": "static", "read_buffer_bytes": buffer_bytes}
    artifact = in_memory(MODEL, device, (WHOLE_MLP,), 1.0, 0.0, **plan).reading(reader.descriptor, reader.checksums)
    return decoder(artifact, direct.Plugin(artifact, device.flash.queue_depth.value))


def _request_s(device: DeviceProfile, cost_s: float, reads: Arrival) -> float:
    assert device.compute is not None
    figure = Figure(value=cost_s, source="tried")
    device = device.model_copy(update={"compute": device.compute.model_copy(update={"portion_s": figure})})
    num_bytes = INTERMEDIATE_SIZE * UNIT_BYTES
    return fetch_seconds(device, Weights(FORMAT, num_bytes), reads, 0, num_bytes, 0)
