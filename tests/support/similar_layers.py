"""Simulates layers whose MLP inputs have a planted similarity: a real store on modelled flash, without weights.

Signals are random: the inputs of consecutive layers have the planted cosine, inner activations are independent, and
top-k selects from both. Guesses, caches, reads and modelled seconds come from the runtime. The plan comes from the
compiler, which gets statistics and read costs of other tokens.
"""

import shutil
import tempfile
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.io import save_arrays
from coldpress.compiler.sections import make_sections
from coldpress.compiler.stages import plan as plan_stage
from coldpress.compiler.stages.plan._search import Found
from coldpress.runtime.arithmetic import largest
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.dram.budget import refit
from coldpress.runtime.flash import simulated
from coldpress.runtime.sparsity import Residency, topk
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.facts import Key
from coldpress.runtime.store.resident import token_seconds
from coldpress.runtime.store.store import Store
from coldpress.schemas.activations import Activations, FamilyStatistics, LayerStatistics
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName, num_units
from coldpress.schemas.layout import Plan, placed_parts
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.order import FamilyOrder, GapCost, Order
from coldpress.schemas.placement import LayerPlacement, Placement
from coldpress.schemas.sparsity import Sparsity
from tests.support.records import Laid, lay_out, manifest_of, tiny_sparsity
from tests.support.shapes import spec_7b
from tests.support.tiny import describe, tensor_shapes

CONTEXT_TOKENS = 512
GAPS_BYTES = (0, 8192, 16384, 24576, 32768, 40960)
FILLING = 8
"""Number of requests that together bring every unit of a part once, to fill the caches."""
CALIBRATION_TOKENS = 8
FAMILIES_READ: tuple[FamilyName, ...] = ("mlp_in", "mlp_mid")
NOWHERE = ArrayFile(array_file="", sha256="0" * 64)


class _Choice(Selection):
    """Selects by top-k without an artifact's tables."""

    def __init__(self, artifact: Artifact, plan: Plan) -> None:
        self.method, self._title, self.sees_residency, self.sees_others = topk.Plugin(), "topk", False, False
        self.arrays = {
            (part.layer, part.family): topk.Plugin().fit(section.num_units, part.density, {}, topk.Options())
            for part, section in placed_parts(plan, artifact.manifest.flash.sections)
        }

    def choose(self, key: Key, signal_TN: np.ndarray, residency: Residency) -> tuple[list[np.ndarray], np.ndarray]:
        """See `coldpress.runtime.store.preload.Choose`."""
        return self.select(key, signal_TN, residency), signal_TN


@dataclass(frozen=True)
class Decoded:
    """The modelled seconds of one token, and the counters summed over all tokens."""

    token_s: float
    flash_s: float
    """Seconds of its flash reads."""
    dram_s: float
    """Seconds of its computing, without flash reads."""
    counters: Any
    by_part_s: dict[tuple[int, FamilyName], float]
    """Flash seconds of a token's requests for each part."""

    @property
    def precision(self) -> float:
        """Share of the bytes preloaded that a request then used."""
        return self.counters["preload_used_bytes"] / max(1, self.counters["preloaded_bytes"])


@dataclass(frozen=True)
class SimilarLayers:
    """A model's shape, the similarity of its layers' inputs, and the device."""

    device: DeviceProfile
    act: str
    density: float
    similarity: float
    share: float
    """DRAM budget beyond resident weights, KV cache, bookkeeping and 4 MiB of read buffer, per byte of all units."""
    layers_per_group: int = 1
    num_layers: int = 8
    hidden_size: int = 4096

    @cached_property
    def records(self) -> tuple[Model, Sparsity, Placement]:
        """The records that `layout` takes from earlier stages."""
        spec = self._spec
        model = describe(spec, tensor_shapes(spec), Path("nowhere/model.safetensors"))
        sparsity = tiny_sparsity(
            model,
            "topk",
            "int4_group32",
            density=self.density,
            layers_per_group=self.layers_per_group,
            context_length=CONTEXT_TOKENS,
        )
        units = self.num_layers * sum(
            num_units(family, spec) * unit_bytes(family, spec, sparsity.format) for family in sparsity.families
        )
        budget = sparsity.budget
        fixed = budget.resident_bytes + budget.kv_cache_bytes + budget.bookkeeping_bytes
        changes = {"dram_budget_bytes": fixed + int(self.share * units) + (4 << 20)}
        sparsity = sparsity.model_copy(update={"budget": budget.model_copy(update=changes)})
        parts = tuple(
            LayerPlacement(layer=layer, family=family, num_pinned=0, min_pinned=0)
            for layer in range(self.num_layers)
            for family in sparsity.families
        )
        values: dict[str, Any] = {"objective": 1.0, "gap": 0.0, "pinned_bytes": 0, "pinned_share": 0.0}
        ranks = {f"rank.{part.layer}.{part.family}": self._drawn_order[part.layer, part.family] for part in parts}
        arrays = self._saved("placement", ranks)
        return model, sparsity, Placement(solver="t", layers=parts, arrays=arrays, **values)

    @cached_property
    def _folder(self) -> Path:
        """A temporary folder for the records' arrays, removed together with this object."""
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    def _saved(self, name: str, arrays: dict[str, np.ndarray]) -> ArrayFile:
        return save_arrays(self._folder / f"{name}.safetensors", arrays)

    @cached_property
    def _drawn_order(self) -> dict[tuple[int, FamilyName], np.ndarray]:
        """(layer, family) -> a random order of the units, int32 [num_units]; the layers of a group share it."""
        random = np.random.default_rng(0)
        found: dict[tuple[int, FamilyName], np.ndarray] = {}
        for section in make_sections(self._spec, FAMILIES_READ, "int4_group32", self.layers_per_group):
            order = random.permutation(section.num_units).astype(np.int32)
            found |= {(layer, section.family): order for layer in section.layers}
        return found

    @cached_property
    def _spec(self) -> ModelSpec:
        width = self.hidden_size
        sizes = {"hidden_size": width, "intermediate_size": width * 7 // 2}
        heads = {"num_attention_heads": width // 128, "num_key_value_heads": max(1, width // 512)}
        return spec_7b(self.num_layers, 1024, self.act).model_copy(update=sizes | heads)

    def layout(self, preload: str = "off", order: Sequence[Order] = ()) -> Laid:
        """Runs `layout` and `plan` and returns their decisions."""
        model, sparsity, placement = self.records
        sparsity = sparsity.model_copy(update={"cache": "lfu"})
        # only preloading is compared, so `plan` keeps its first division of the budget
        with patch.object(plan_stage, "search", lambda division, start, *_: Found(start)):
            return lay_out(
                model, sparsity, placement, self.device, order=order, activations=self.activations, preload=preload
            )

    def artifact(self, layout: Laid) -> Artifact:
        """Returns an artifact with a random order of units and no weights."""
        model, sparsity, placement = self.records
        manifest = manifest_of(model, sparsity, placement, self.device, layout)
        tables = {}
        for section in layout.sections:
            order = self._drawn_order[section.first_layer, section.family]
            tables[f"order.{section.first_layer}.{section.family}"] = order
            tables |= {f"rank.{layer}.{section.family}": order for layer in section.layers}
        return Artifact("nowhere", "0" * 64, manifest, {}, (), None, tables)  # type: ignore[arg-type]

    def signals(self, num_tokens: int, seed: int) -> list[dict[FamilyName, np.ndarray]]:
        """Returns, for each token, family -> signals float32 [num_layers, num_units]."""
        random, found = np.random.default_rng(seed), []
        model, _, _ = self.records
        for _ in range(num_tokens):
            noise = random.standard_normal((self.num_layers, model.spec.hidden_size)).astype(np.float32)
            inputs = noise.copy()
            for layer in range(1, self.num_layers):
                inputs[layer] = self.similarity * inputs[layer - 1] + (1 - self.similarity**2) ** 0.5 * noise[layer]
            inner = random.standard_normal((self.num_layers, model.spec.intermediate_size)).astype(np.float32)
            found.append({"mlp_in": inputs, "mlp_mid": inner})
        return found

    @cached_property
    def activations(self) -> Activations:
        """Activations of other tokens as `recalibrate` counts them: used units, and the share the layer before used."""
        tokens = self.signals(CALIBRATION_TOKENS, 7)
        layers, before = [], None
        for layer in range(self.num_layers):
            families = []
            for family in FAMILIES_READ:
                k = topk.num_selected(tokens[0][family].shape[1], self.density)
                used = largest(np.abs(np.stack([token[family][layer] for token in tokens])), k)
                shared = None
                if family == "mlp_in":
                    shared = None if before is None else float((used & before).sum() / used.sum())
                    before = used
                bits = np.packbits(used.T, axis=1, bitorder="little")
                families.append(
                    FamilyStatistics(
                        family=family,
                        num_units=used.shape[1],
                        density=self.density,
                        arrays=self._saved(f"{layer}.{family}", {"bits": bits}),
                        in_layer_before=shared,
                    )
                )
            layers.append(LayerStatistics(layer=layer, families=tuple(families), inputs=NOWHERE, input_similarity=None))
        return Activations(num_tokens=CALIBRATION_TOKENS, exact_zeros=False, layers=tuple(layers))

    @cached_property
    def order(self) -> Order:
        """An order whose gap costs are modelled on other tokens."""
        layout = self.layout()
        artifact, entries = self.artifact(layout), []
        costs = {gap: self.decoded(artifact, self.plan(artifact, gap), 2, seed=7).by_part_s for gap in GAPS_BYTES}
        for section in layout.sections:
            own = [(layer, section.family) for layer in section.layers]
            paid = [GapCost(gap_bytes=gap, flash_s_per_token=sum(costs[gap][key] for key in own)) for gap in GAPS_BYTES]
            arrays = {"order": self._drawn_order[section.first_layer, section.family]}
            saved = self._saved(f"order.{section.first_layer}.{section.family}", arrays)
            values: dict[str, Any] = {"heuristic": "t", "arrays": saved, "adjacent_coactivation": 0.0}
            entries.append(
                FamilyOrder(
                    layer=section.first_layer,
                    num_layers=len(section.layers),
                    family=section.family,
                    gap_costs=tuple(paid),
                    **values,
                )
            )
        return Order(entries=tuple(entries))

    def plan(self, artifact: Artifact, gap_bytes: int, **changes: Any) -> Plan:
        """Returns the artifact's plan with another gap and `changes`, fitted to the same budget."""
        plan = artifact.manifest.plans[0]
        changed = plan.model_copy(update={"collapse_gap_bytes": gap_bytes} | changes)
        return refit(artifact.manifest, changed, plan.dram_budget_bytes)

    def decoded(self, artifact: Artifact, plan: Plan, num_tokens: int, seed: int = 1) -> Decoded:
        """Decodes `num_tokens` tokens with full caches, after one token that is not counted."""
        clock = Clock(artifact.manifest, plan)
        store = Store(artifact, plan, simulated.Plugin(artifact, plan.queue_depth), clock)
        self._fill(store)
        choice = _Choice(artifact, plan)
        families, by_part = artifact.manifest.plans[0].parts, defaultdict(float)
        before = _counted(store, clock)
        for number, token in enumerate(self.signals(1 + num_tokens, seed)):
            if number == 1:
                before = _counted(store, clock)
                by_part.clear()
            for layer, group in _by_layer(families):
                for family in group:
                    key, signal, then = (layer, family), token[family][layer][None], clock.flash_s
                    (ids,) = choice.select(key, signal, store.residency(key))
                    deque(store.submit(key, ids), maxlen=0)
                    by_part[key] += (clock.flash_s - then) / num_tokens
                store.preloader.layer_done(
                    layer, {family: token[family][layer][None] for family in group}, choice.choose
                )
            store.end_tokens()
        then = _counted(store, clock)
        counted = {name: then[name] - before[name] for name in then}
        return self._decoded(artifact, plan, counted, num_tokens, dict(by_part))

    def _fill(self, store: Store) -> None:
        for part, section in placed_parts(store.plan, store._manifest.flash.sections):
            units = np.random.default_rng(part.layer).permutation(section.num_units).astype(np.int32)
            for some in np.array_split(units, FILLING):
                deque(store.submit((part.layer, part.family), np.sort(some)), maxlen=0)
        store.end_tokens()
        store.reset()

    def _decoded(
        self,
        artifact: Artifact,
        plan: Plan,
        counted: dict[str, float],
        num_tokens: int,
        by_part_s: dict[tuple[int, FamilyName], float],
    ) -> Decoded:
        besides_s = token_seconds(artifact.manifest, plan)
        return Decoded(
            token_s=counted["modelled_fetch_s"] / num_tokens + besides_s,
            flash_s=counted["modelled_flash_s"] / num_tokens,
            dram_s=counted["modelled_work_s"] / num_tokens + besides_s,
            counters=counted,
            by_part_s=by_part_s,
        )


def _counted(store: Store, clock: Clock) -> dict[str, float]:
    """Returns the store's counters and the clock's seconds so far."""
    seconds = {"modelled_flash_s": clock.flash_s, "modelled_work_s": clock.work_s, "modelled_fetch_s": clock.fetch_s}
    return asdict(store.counters) | seconds


def _by_layer(parts: Sequence[Any]) -> list[tuple[int, list[FamilyName]]]:
    found: dict[int, list[FamilyName]] = {}
    for part in parts:
        found.setdefault(part.layer, []).append(part.family)
    return list(found.items())
