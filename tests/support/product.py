"""Compiles a tiny model of any architecture for any selector and format, and compares the runtime with the evaluation.

One claim is tested: the runtime decodes the logits of the evaluation's masked forward pass over transformers' modules
(benchmarks/evaluation/evaluate.py), with the artifact's weights and selector arrays. The artifact's codes are decoded
and written as another checkpoint, so that quantization makes no difference. Two differences remain: the KV cache in
fp16 and, at the edge of a choice, one unit more or less.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evaluation.evaluate import CacheSettings, Masks, Sparse
from benchmarks.evaluation.reads import Placed, Reading
from coldpress.compiler.activity.choice import Arrays
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.candidates import families_for
from coldpress.compiler.cost_model import dense_footprint_bytes, row_table_bytes
from coldpress.compiler.io import Workspace, load_record, save_arrays, save_record
from coldpress.compiler.job import Job, run_job
from coldpress.compiler.kept_codes import keeping
from coldpress.compiler.search.budgets import BudgetChoice
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.dram_shares import asked_budgets_of
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.sections import bookkeeping_bytes, make_sections
from coldpress.compiler.stages import allocate, ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.workflow.settings import resolve
from coldpress.runtime import plugins
from coldpress.runtime.generate.session import Session
from coldpress.runtime.sparsity import Selector, uses_read_units
from coldpress.runtime.store.planner import MAX_READ_BYTES, Strided
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FAMILIES, HeadFormat, mlp_density, with_head
from coldpress.schemas.layout import placed_parts
from coldpress.schemas.model import Model
from tests.support.dag import inputs_for
from tests.support.dense_codes import flash_values, resident_values, write_as_stored
from tests.support.models import RELU_TYPES, SMOOTH_TYPES, write_model
from tests.support.stages import between

LAYERS, BLOCK_TOKENS = 2, 32
BLOCKS = {"calibration": 16, "validation": 4, "test": 2}
SHARED = ("ingest", "tokenize")
"""Stages whose records all artifacts of a model share."""
STAGES = (*SHARED, *between("calibrate", "package"))
DENSITY, DENSITY_OF_ACTIVE = 0.4, 0.02
"""For selectors that need a density; and for those that choose by a ReLU's activations, few of which are not zero."""
TIGHT_SHARE, SHARE, PREDICTORS_ROOM_BYTES = 0.93, 1.0, 400_000
"""DRAM budgets without bookkeeping, which takes more than a tiny model. The first two are shares of the KV cache and
of weights without those that are read by row: a selector that sees its cache has to evict; for the others a whole gate
or up must fit. The last is in bytes, since predictors are larger than the weights that they save."""
ATTENTION = frozenset({"attention_input", "attention_mixed"})
CLOSE = 1e-3
"""Tolerated share of the largest logit: a hundred times the error of rounding in another order."""
CARRIED_OVER, NORM_AFTER = 0.1, 0.02
"""Tolerated shares of the effect of leaving out units, where they allow more than CLOSE: one unit more or less at the
edge of a choice is a part of that effect. The first counts for each way in which a choice reaches later tokens, the
second if a norm after the block makes all errors larger."""


@dataclass(frozen=True)
class Case:
    """One artifact to compile."""

    architecture: str
    method: str
    format: str
    attention: bool = False
    """Whether the selector chooses inputs of attention's matrices, too."""
    layer_formats: tuple[str, ...] | str = ()
    """The format of each layer's units, or of its matrices, where they differ; or that of all layers' matrices."""
    head: str | None = None
    """The head's own format."""

    @property
    def options(self) -> dict[str, Any]:
        """The selector's options."""
        return {"attention": True} if self.attention else {}

    @property
    def relu(self) -> bool:
        """Whether the model has exact zeros: the selector needs them, or the architecture always has them."""
        return (
            self.architecture in RELU_TYPES
            or plugins.load("coldpress.runtime.sparsity", Selector, self.method).NEEDS_EXACT_ZEROS
        )


@dataclass(frozen=True)
class Source:
    """A model and its text, as records in a folder."""

    folder: Path
    model: Model
    tokens: np.ndarray
    """Test text, int32 [blocks, BLOCK_TOKENS]."""
    path: Path
    """The checkpoint."""


@dataclass(frozen=True)
class Difference:
    """Errors of the runtime's logits against the masked forward pass, as shares of the largest logit."""

    median: float
    """Median over tokens of each token's largest error."""
    mean: float
    left_out: float
    """The most that leaving out units moves any logit."""
    ways_on: int
    """Number of ways in which a choice reaches later tokens: the cache that they see, and keys and values."""
    norm_after: bool
    """Whether the model's norms come after its blocks."""

    @property
    def equal(self) -> bool:
        """Whether rounding explains the errors."""
        if self.ways_on:
            return self.mean < max(CLOSE, CARRIED_OVER * self.ways_on * self.left_out)
        return max(self.median, self.mean) < max(CLOSE, NORM_AFTER * self.left_out if self.norm_after else 0)


def source_of(folder: Path, architecture: str, relu: bool, layers: int = LAYERS, **overrides: Any) -> Source:
    """Writes and ingests a tiny random model with random text; `overrides` replace keys of config.json."""
    write_model(folder / "tiny", architecture, num_hidden_layers=layers, relu=relu, overrides=overrides)
    model = ingest.run(IngestConfig(model=str(folder / "tiny")), Workspace(folder / "ingest", "test"))
    return with_text(folder, folder / "tiny", model)


def with_text(folder: Path, path: Path, model: Model) -> Source:
    """Writes the record of a model, whose checkpoint is at `path`, and random text."""
    save_record(model, folder / "ingest.json")
    splits: list[TokenBlocks] = []
    random, vocab_size = np.random.default_rng(5), model.spec.vocab_size
    texts = {name: random.integers(2, vocab_size, (BLOCKS[name], BLOCK_TOKENS)).astype(np.int32) for name in SPLITS}
    for split, tokens in texts.items():
        arrays = save_arrays(folder / f"{split}.safetensors", {"tokens": tokens})
        splits.append(TokenBlocks(split=split, arrays=arrays, num_blocks=len(tokens), block_tokens=BLOCK_TOKENS))
    save_record(Corpus(name="random", text_sha256="0" * 64, splits=tuple(splits)), folder / "tokenize.json")
    return Source(folder, model, texts["test"], path)


def compiled(source: Source, case: Case, folder: Path) -> Path:
    """Compiles the artifact with the stages, as jobs do; returns its path."""
    selector = plugins.load("coldpress.runtime.sparsity", Selector, case.method)
    chosen: dict[str, Any] = {"method": case.method, "format": case.format, "context_length": BLOCK_TOKENS}
    if selector.densities(case.relu) in ("budget", "capped"):
        share = DENSITY_OF_ACTIVE if case.relu and _sees_activations(selector) else DENSITY
        families = families_for(case.method, case.options, source.model.spec)
        chosen["density"] = mlp_density(dict.fromkeys(families, share), source.model.spec)
        # to save time, densities differ by layer only in one selector with one density and in one with several
        chosen["density_allocation"] = "greedy" if case.method in ("topk", "dip") else "uniform"
    chosen |= case.options
    # nothing is pinned, since the evaluation models caches only
    chosen |= {"pinned_share": 0, "dram_budget": _budget_bytes(source, case, selector)}
    chosen |= {"search_tokens": 64}
    config = resolve({"model": str(source.path), **chosen})
    folder.mkdir(parents=True)
    save_record(config.device, folder / "device.json")
    inputs = inputs_for(config)
    artifact = folder / "a.coldpress"
    for stage in (stage for stage in STAGES if stage in inputs and stage not in SHARED):
        settings = config.of_stage(stage) | ({"artifact": str(artifact)} if stage == "package" else {})
        records = {
            name: ((source.folder if found in SHARED else folder) / f"{found}.json",)
            for name, found in inputs[stage].items()
        }
        layers = tuple(range(source.model.spec.num_hidden_layers))
        run_job(Job(stage, settings, records, folder / f"{stage}.json", layers))
        if stage == "allocate" and (case.layer_formats or case.head):
            _divide_again(source, case, folder, AllocateConfig(**settings))
    return artifact


def _divide_again(source: Source, case: Case, folder: Path, config: AllocateConfig) -> None:
    """Replaces the record of `allocate` by its division with the formats of each layer and of the head."""
    activations = load_record(folder / "calibrate.json", Activations)
    device, work = load_record(folder / "device.json", DeviceProfile), Workspace(folder / "again", "test")
    inputs = AllocationInputs(source.model, activations, device, work, None, 1)
    (budget,) = asked_budgets_of(config, source.model, device)
    formats = keeping(source.model, case.layer_formats or case.format)
    if case.head:
        formats = with_head(formats, HeadFormat(role=source.model.spec.head_role, format=case.head))
    choice = BudgetChoice(config.model_copy(update={"dram_budget": budget}), formats)
    (found,) = allocate._decisions([choice], inputs)
    save_record(found, folder / "allocate.json")


def _budget_bytes(source: Source, case: Case, selector: Any) -> int:
    model, page_bytes = source.model, resolve({"model": str(source.path)}).device.flash.page_bytes.value
    sections = make_sections(model.spec, families_for(case.method, case.options, model.spec), case.format)
    besides = bookkeeping_bytes(model.spec, sections, case.format, case.method, {"lfu"}, page_bytes)
    if selector.NEEDS_PREDICTORS:
        return PREDICTORS_ROOM_BYTES + besides
    share = TIGHT_SHARE if selector.SEES_RESIDENCY else SHARE
    whole = dense_footprint_bytes(model, case.format, BLOCK_TOKENS) - row_table_bytes(model.spec, case.format)
    return int(share * whole) + besides


def has_zeros_for(architecture: str, method: str) -> bool:
    """Returns whether an architecture can have the exact zeros that a selector may need."""
    selector = plugins.load("coldpress.runtime.sparsity", Selector, method)
    return architecture not in SMOOTH_TYPES or not selector.NEEDS_EXACT_ZEROS


def has_attention(method: str) -> bool:
    """Returns whether a selector can choose inputs of attention's matrices."""
    selector = plugins.load("coldpress.runtime.sparsity", Selector, method)
    return "attention" in selector.OPTIONS.model_fields


def _sees_activations(selector: Any) -> bool:
    families = [FAMILIES[name] for name in selector.CHOOSES]
    return all(family.axis == "intermediate_size" and family.signal == family.activity for family in families)


def arrays_of(session: Session) -> Arrays:
    """Returns the selector's arrays in the artifact, predictors included, by layer and family."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for part in session.plan.parts:
        arrays: dict[str, Any] = dict(session.artifact.selector_arrays(session.plan, part.layer, part.family) or {})
        network = session.artifact.predictors.get(part.layer)
        if network is not None:
            arrays |= {"fc1": network.fc1, "fc2": network.fc2, "format": network.format, "threshold": network.threshold}
        found[part.layer, part.family] = arrays
    return found


def reading_of(session: Session) -> Reading:
    """Returns how the session reads: the device's flash, the gap, the longest read, and the places of units."""
    plan, manifest = session.plan, session.artifact.manifest
    placed = {
        (part.layer, part.family): Placed(
            Strided(section.part_offset_bytes(part.layer), section.unit_bytes, section.stride_bytes),
            session.artifact.order(section),
        )
        for part, section in placed_parts(plan, manifest.flash.sections)
    }
    flash = manifest.device.flash.issuing(plan.queue_depth)
    return Reading(flash, plan.collapse_gap_bytes, MAX_READ_BYTES, uses_read_units(plan), placed)


def with_codes(session: Session, model: Model, folder: Path) -> Model:
    """Writes the model as a float32 checkpoint whose weights are the values of the artifact's codes."""
    shutil.copytree(model.folder, folder)
    values = resident_values(session.artifact) | flash_values(session)
    write_as_stored(model, values, folder / "model.safetensors")
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


def difference(artifact: Path, source: Source, folder: Path) -> Difference:
    """Decodes the test text token by token, runs it through the masked layers, and returns the errors."""
    session = Session(artifact)
    decoded = []
    for block in source.tokens:
        session.decoder.begin(len(block))
        decoded.append(np.stack([session.decoder.decode(int(token)) for token in block]))
    model = with_codes(session, source.model, folder)
    families = tuple(entry.family for entry in session.artifact.manifest.families)
    selector = plugins.load("coldpress.runtime.sparsity", Selector, session.plan.method)
    masks = Masks(Sparse(selector, families, arrays_of(session)), model.spec, reading=reading_of(session))
    if selector.SEES_RESIDENCY:
        masks.cache = CacheSettings(session.plan.cache, slots_of(session), session.plan.cache_options)
    stream = LayerStream(model)
    found, dense = stream.head(stream.last_hidden(source.tokens, masks.layer)).numpy(), stream.logits(source.tokens)
    errors, largest = np.abs(found - np.stack(decoded)), np.abs(found).max()
    return Difference(
        median=float(np.median(errors.max(axis=2)) / largest),
        mean=float(errors.mean() / largest),
        left_out=float(np.abs(found - dense).max() / largest),
        ways_on=selector.SEES_RESIDENCY + any(FAMILIES[name].activity in ATTENTION for name in families),
        norm_after=model.spec.norm_placement != "before",
    )


def slots_of(session: Session) -> Mapping[str, int]:
    """Returns family -> slots of a layer's cache; checks that all layers have as many."""
    found: dict[str, set[int]] = {}
    for part in session.plan.parts:
        assert part.num_pinned == 0
        found.setdefault(part.family, set()).add(part.cache_slots)
    assert all(len(slots) == 1 for slots in found.values()), found
    return {family: slots.pop() for family, slots in found.items()}
