"""Decoders of models without files, whose weights are random: for measurements of what surrounds the products."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from coldpress.compiler.checkpoint.shapes import Shape, Shapes
from coldpress.compiler.seconds import Setting
from coldpress.compiler.sections import make_sections
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.flash import Reader
from coldpress.runtime.plan.kv_cache import kv_cache_bytes
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.store.store import Store
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName, FormatName
from coldpress.schemas.layout import PartPlan, Plan
from coldpress.schemas.model import ATTENTION_ROLES, MLP_ROLES, ModelSpec, role_shape

FORMAT: FormatName = "int8_group32"
CONTEXT_TOKENS = 64


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


def decoder(artifact: InMemory, flash: Reader) -> Decoder:
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
