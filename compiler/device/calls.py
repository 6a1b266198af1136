"""Measures the fixed seconds of a request, a layer and a token: all that is not spent in matrix products.

Tiny models decode, so that their products take no time. Decoder, selector and store are the runtime's; flash is
simulated, and no file is written. The models differ in their number of layers, in the requests of a layer, and in
whether requests hit the cache, so that differences between their tokens give each cost. Processor time is measured,
because other work on the machine lengthens wall time.
"""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from coldpress.compiler.seconds import Setting
from coldpress.compiler.sections import make_sections
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.flash import simulated
from coldpress.runtime.plan.kv_cache import kv_cache_bytes
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.store.store import Store
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName, FormatName
from coldpress.schemas.layout import PartPlan, Plan
from coldpress.schemas.model import ATTENTION_ROLES, MLP_ROLES, ModelSpec, role_shape

FORMAT: FormatName = "int8_group32"
FEW_LAYERS, MANY_LAYERS = 2, 12
CONTEXT_TOKENS = 64
ROUNDS, TOKENS = 15, 10
TWO: tuple[FamilyName, ...] = ("mlp_in", "mlp_mid")
FOUR: tuple[FamilyName, ...] = ("attn_in", "attn_out", *TWO)
"""The families of a layer; each is one request."""


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time: the least of several rounds, and the largest spread between rounds."""

    request_s: float
    reading_s: float
    layer_s: float
    token_s: float
    spread: float


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Model:
    """A model without weights, as `HasShapes`."""

    spec: ModelSpec
    tensors: Mapping[str, _Shape]

    @property
    def num_parameters(self) -> int:
        """The number of parameters of all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def _tiny(num_layers: int) -> _Model:
    """A gated model, 64 wide."""
    spec = ModelSpec(
        model_type="llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOKENS,
        hidden_act="silu",
        gated_mlp=True,
        norm="rms_norm",
        norm_eps=1e-5,
        position="rotary",
        rotary_dim=16,
        tie_word_embeddings=True,
    )
    of_layer = [*ATTENTION_ROLES, *MLP_ROLES, "input_layernorm", "post_attention_layernorm"]
    roles = [f"layers.{layer}.{name}.weight" for layer in range(num_layers) for name in of_layer]
    shapes = {role: _Shape(role_shape(spec, role)) for role in ("embed_tokens.weight", *roles, "norm.weight")}
    return _Model(spec, shapes)


@dataclass(frozen=True, eq=False)
class _InMemory(Artifact):
    """An artifact whose resident tensors are random, and in no file."""

    @cached_property
    def resident(self) -> dict[str, np.ndarray]:
        """See `Artifact`."""
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


def call_costs(device: DeviceProfile) -> Costs:
    """Returns the fixed seconds on this machine; `device` gives pages and queue depth of the simulated flash."""
    cases: dict[str, Decoder] = {
        "few layers": _decoder(device, FEW_LAYERS, TWO),
        "many layers": _decoder(device, MANY_LAYERS, TWO),
        "requests": _decoder(device, MANY_LAYERS, FOUR),
        "reads": _decoder(device, MANY_LAYERS, TWO, slots=1 / 8),
    }
    with np.errstate(all="ignore"):
        rounds = [{name: _token_s(decoder) for name, decoder in cases.items()} for _ in range(ROUNDS + 1)][1:]
    samples = {name: [found[name] for found in rounds] for name in cases}
    token_s = {name: min(each) for name, each in samples.items()}
    more = {name: token_s[name] - token_s["many layers"] for name in ("requests", "reads")}
    request_s = more["requests"] / (MANY_LAYERS * (len(FOUR) - len(TWO)))
    layer_s = (token_s["many layers"] - token_s["few layers"]) / (MANY_LAYERS - FEW_LAYERS)
    return Costs(
        request_s=max(0.0, request_s),
        reading_s=max(0.0, more["reads"] / (MANY_LAYERS * len(TWO))),
        layer_s=max(0.0, layer_s - len(TWO) * request_s),
        token_s=max(0.0, token_s["few layers"] - FEW_LAYERS * layer_s),
        spread=max((max(each) - min(each)) / statistics.median(each) for each in samples.values()),
    )


def _token_s(decoder: Decoder) -> float:
    """Mean processor seconds of a token, each at the same place of the context."""
    length = decoder.length
    start = time.thread_time()
    for token in range(TOKENS):
        decoder.decode(token)
        decoder.roll_back(length)
    return (time.thread_time() - start) / TOKENS


def _decoder(
    device: DeviceProfile, num_layers: int, families: tuple[FamilyName, ...], slots: float | None = None
) -> Decoder:
    """A decoder with a context of a few tokens; a cache holds `slots` of the units, or all are in DRAM (None)."""
    model = _tiny(num_layers)
    sections = make_sections(model.spec, families, FORMAT)
    parts = tuple(
        PartPlan(
            layer=section.first_layer,
            family=section.family,
            density=0.5,
            num_pinned=section.num_units if slots is None else 0,
            cache_slots=0 if slots is None else round(slots * section.num_units),
        )
        for section in sections
    )
    plan: dict[str, Any] = {
        "name": "calls",
        "method": "topk",
        "options": {"attention": families == FOUR},
        "cache": "static" if slots is None else "lru",
        "dram_budget_bytes": device.dram_bytes.value,
        "context_length": CONTEXT_TOKENS,
        "resident_bytes": 0,
        "predictor_bytes": 0,
        "kv_cache_bytes": kv_cache_bytes(model.spec, CONTEXT_TOKENS),
        "read_buffer_bytes": 64 * device.flash.page_bytes.value,
        "collapse_gap_bytes": 0,
        "queue_depth": device.flash.queue_depth.value,
        "parts": parts,
    }
    made = Setting(model, FORMAT, device, sections, Plan(**plan)).artifact
    artifact = _InMemory(**vars(made))
    store = Store(artifact, artifact.manifest.plans[0], simulated.Plugin(artifact, device.flash.queue_depth.value))
    decoder = Decoder(artifact, store, Selection(artifact, artifact.manifest.plans[0]))
    decoder.begin(CONTEXT_TOKENS)
    decoder.prefill(np.arange(4))
    return decoder
