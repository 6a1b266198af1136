"""Makes the records of a whole build for a tiny model with numpy alone, for tests of the last stages.

Weights come from integer hashing, not from a random generator: the same arguments give the same bytes with any version
of numpy, and the golden digests depend on that.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coldpress.compiler.cost_model import kv_cache_bytes, predictor_bytes, resident_bytes, resident_tensors
from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.sections import bookkeeping_bytes, make_sections
from coldpress.compiler.stages import layout as layout_stage
from coldpress.compiler.stages import plan as plan_stage
from coldpress.compiler.stages.allocate import with_smaller
from coldpress.compiler.stages.package import PackageConfig, make_manifest
from coldpress.compiler.stages.package import run as run_package
from coldpress.compiler.stages.package.documents import DocumentInputs
from coldpress.compiler.stages.package.hashing import Written
from coldpress.compiler.stages.package.joined import Codes
from coldpress.compiler.stages.quantize import QuantizeConfig
from coldpress.compiler.stages.quantize import run as run_quantize
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.activations import Activations, FamilyStatistics, LayerStatistics
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.drafter import Drafter
from coldpress.schemas.families import FormatName, HeadFormat, Method, num_units
from coldpress.schemas.layout import Collapse, KvCacheFormat, Layout, Plan, Section
from coldpress.schemas.manifest import FLASH_FILE, PREDICTORS_FILE, RESIDENT_FILE, TABLES_FILE, ArtifactFile, Manifest
from coldpress.schemas.metrics import (
    DenseRun,
    Divergence,
    LadderStep,
    MeasuredBlock,
    PlanDrafts,
    PlanFigures,
    Protocol,
    ReadLength,
    RunMetrics,
    Sample,
    Verification,
)
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.order import FamilyOrder, Order
from coldpress.schemas.package import Package
from coldpress.schemas.placement import LayerPlacement, Placement
from coldpress.schemas.plans import Plans
from coldpress.schemas.predictors import LayerPredictor, Predictors
from coldpress.schemas.provenance import Provenance
from coldpress.schemas.quantized import LayerCodes, Quantized
from coldpress.schemas.sparsity import Budget, Densities, Sparsity
from tests.support.methods import families_of, fitted
from tests.support.tiny import hashed, shuffled, tiny_corpus, tiny_device, tiny_model, tiny_spec


def tiny_sparsity(
    model: Model,
    method: Method = "topk",
    format_name: FormatName = "int8_group32",
    budget_share: float = 0.5,
    density: float = 0.25,
    rank: int = 8,
    context_length: int = 64,
    predictor_format: FormatName = "int8_group32",
    whole_layers: tuple[int, ...] = (),
    layers_per_group: int = 1,
    kept: KvCacheFormat = "fp16",
) -> Sparsity:
    """Returns a sparsity whose budget holds all resident bytes, and `budget_share` of the units for buffers and cache.

    Layers in `whole_layers` use every unit and get no predictor.
    """
    spec, families = model.spec, families_of(method, model.spec)
    layers = range(spec.num_hidden_layers)
    ranks = tuple(0 if layer in whole_layers else rank for layer in layers) if method == "predictor" else ()
    per_layer = tuple(1.0 if method == "dense" or layer in whole_layers else density for layer in layers)
    resident = resident_bytes(model, families, format_name)
    kv_cache = kv_cache_bytes(spec, context_length, kept)
    predictors = sum(predictor_bytes(spec, size, predictor_format) for size in ranks)
    sections = make_sections(spec, families, format_name, layers_per_group)
    bookkeeping = bookkeeping_bytes(spec, sections, format_name, method, {"lfu"}, 4096)
    cache = int(budget_share * spec.num_hidden_layers * spec.intermediate_size * spec.hidden_size * 3) + 40_000
    return Sparsity(
        method=method,
        format=format_name,
        context_length=context_length,
        kv_cache=kept,
        densities=tuple(Densities(family=family, per_layer=per_layer) for family in families),
        predictor_rank=ranks,
        predictor_format=predictor_format if ranks else None,
        budget=Budget(
            dram_budget_bytes=resident + kv_cache + predictors + bookkeeping + cache,
            resident_bytes=resident,
            predictor_bytes=predictors,
            kv_cache_bytes=kv_cache,
            bookkeeping_bytes=bookkeeping,
            buffer_bytes=0,
            cache_bytes=cache,
        ),
        layers_per_group=layers_per_group,
    )


def tiny_placement(folder: Path, model: Model, sparsity: Sparsity, num_pinned: int = 3) -> Placement:
    """Pins `num_pinned` units of every family and layer."""
    arrays: dict[str, np.ndarray] = {}
    layers: list[LayerPlacement] = []
    for layer in range(model.spec.num_hidden_layers):
        for family in families_of(sparsity.method, model.spec):
            places = np.ones(num_units(family, model.spec), np.int8)
            rank = shuffled(f"pinned {layer} {family}", places.size)
            own = min(num_pinned, len(rank) - 1)
            places[rank[:own]] = 0
            arrays |= {f"{layer}.{family}": places, f"rank.{layer}.{family}": rank.astype(np.int32)}
            layers.append(LayerPlacement(layer=layer, family=family, num_pinned=own, min_pinned=min(1, own)))
    return Placement(
        solver="test",
        layers=tuple(layers),
        arrays=save_arrays(folder / "placement.safetensors", arrays),
        objective=1.0,
        gap=0.0,
        pinned_bytes=0,
        pinned_share=0.0,
    )


def tiny_order(folder: Path, model: Model, sparsity: Sparsity, layers: tuple[int, ...] | None = None) -> Order:
    """Shuffles the units of every section, with one order per layer group."""
    entries: list[FamilyOrder] = []
    groups = sparsity.groups(model.spec.num_hidden_layers)
    for layer, num_layers in ((group[0], len(group)) for group in groups if layers is None or group[0] in layers):
        for family in families_of(sparsity.method, model.spec):
            order = shuffled(f"order {layer} {family}", num_units(family, model.spec))
            arrays = save_arrays(folder / f"order-{layer}-{family}.safetensors", {"order": order})
            entries.append(
                FamilyOrder(
                    layer=layer,
                    num_layers=num_layers,
                    family=family,
                    heuristic="test",
                    arrays=arrays,
                    adjacent_coactivation=0.5,
                )
            )
    return Order(entries=tuple(entries))


def tiny_predictors(folder: Path, model: Model, sparsity: Sparsity) -> Predictors:
    """Makes predictors of hashed numbers for the layers that get one."""
    layers: list[LayerPredictor] = []
    if sparsity.predictor_format is None:
        return Predictors(weights_sha256=model.weights_sha256, layers=())
    plugin = load("coldpress.runtime.quantization", Format, sparsity.predictor_format)
    for layer, rank in ((layer, rank) for layer, rank in enumerate(sparsity.predictor_rank) if rank):
        arrays = {
            "fc1": plugin.encode(hashed(f"fc1 {layer}", rank, model.spec.hidden_size)),
            "fc2": plugin.encode(hashed(f"fc2 {layer}", model.spec.intermediate_size, rank)),
        }
        layers.append(
            LayerPredictor(
                layer=layer,
                rank=rank,
                format=sparsity.predictor_format,
                threshold=0.25,
                arrays=save_arrays(folder / f"predictor-{layer}.safetensors", arrays),
                nbytes=predictor_bytes(model.spec, rank, sparsity.predictor_format),
                recall=0.9,
                precision=0.6,
                predicted_density=0.3,
                density=0.2,
                num_parameters=rank * (model.spec.hidden_size + model.spec.intermediate_size),
                output_cosine=0.99,
            )
        )
    return Predictors(weights_sha256=model.weights_sha256, layers=tuple(layers))


def tiny_activations(folder: Path, model: Model, sparsity: Sparsity, num_tokens: int = 50) -> Activations:
    """Makes activations of every family: how often a unit is active follows a power law, and units are independent."""
    layers: list[LayerStatistics] = []
    for layer in range(model.spec.num_hidden_layers):
        families: list[FamilyStatistics] = []
        for family in families_of(sparsity.method, model.spec):
            count = num_units(family, model.spec)
            often = 0.9 / (1 + shuffled(f"hot {layer} {family}", count)) ** 0.5
            chance = (hashed(f"chance {layer} {family}", count, num_tokens) + 1) / 2
            active = chance < often[:, None]
            contexts = active.reshape(count, 5, -1).sum(axis=2).T
            arrays = {
                "bits": np.packbits(active, axis=1, bitorder="little"),
                "counts": active.sum(axis=1).astype(np.int64),
                "context_counts": contexts.astype(np.uint16),
                "task_counts": np.stack([contexts[:2].sum(axis=0), contexts[2:].sum(axis=0)]).astype(np.int64),
            }
            saved = save_arrays(folder / f"activations-{layer}-{family}.safetensors", arrays)
            families.append(
                FamilyStatistics(family=family, num_units=count, density=float(active.mean()), arrays=saved)
            )
        inputs = hashed(f"inputs {layer}", num_tokens, model.spec.hidden_size).astype(np.float16)
        saved = save_arrays(folder / f"inputs-{layer}.safetensors", {"mlp_inputs": inputs})
        similarity = None if layer == 0 else 0.8
        layers.append(LayerStatistics(layer=layer, families=tuple(families), inputs=saved, input_similarity=similarity))
    return Activations(num_tokens=num_tokens, exact_zeros=True, layers=tuple(layers))


LADDER = tuple(
    LadderStep(
        name=name,
        tokens_per_s=tokens_per_s,
        gain=gain,
        kept=gain >= 1,
        reads_per_token=9.0,
        read_bytes_per_token=9e4,
        hit_rate=0.5,
    )
    for name, tokens_per_s, gain in (("naive", 250.0, 1.0), ("+window", 125.0, 0.5), ("+ordering", 375.0, 1.5))
)


def tiny_run(plans: Plans) -> RunMetrics:
    """Returns round figures of a run of 100 tokens."""
    return RunMetrics(
        num_tokens=100,
        hits=6000,
        misses=2000,
        evictions=1500,
        reads=500,
        read_bytes=4_096_000,
        used_bytes=400_000,
        active_bytes=1_600_000,
        kept_bytes=100_000,
        modelled_flash_s=0.015,
        modelled_dram_s=0.007,
        modelled_s=0.02,
        flash_s=0.02,
        decode_s=0.5,
        prefill_reads=8,
        prefill_read_bytes=300_000,
        prefill_s=0.01,
        first_token_s=0.1,
        dram_budget_bytes=plans.largest_plan.dram_budget_bytes,
        dram_used_bytes=plans.largest_plan.dram_budget_bytes - 100,
        whole_model_bytes=plans.largest_plan.dram_budget_bytes + 1_000_000,
        peak_rss_bytes=80_000_000,
        extents_sha256="e" * 64,
        direct_io=True,
    )


def tiny_verification(plans: Plans, artifact_sha256: str) -> Verification:
    """Returns the verification of an artifact with the figures of `tiny_run`."""
    return Verification(
        artifact_sha256=artifact_sha256,
        protocol=Protocol(corpus="text", text_sha256="a" * 64, tokens_sha256="b" * 64, context_length=64, stride=64),
        num_test_tokens=100,
        num_test_blocks=8,
        blocks=tuple(
            MeasuredBlock(nll_source=nll, nll_artifact=nll + 0.025, nll_dense=nll + 0.012) for nll in (2.0, 2.16)
        ),
        ppl_source=8.0,
        ppl_source_error=0.64,
        ppl_artifact=8.2,
        ppl_artifact_error=0.66,
        ppl_ratio_error=0.002,
        ppl_dense=8.1,
        dense=DenseRun(
            reads_per_token=24,
            flash_bytes_per_token=98_304,
            flash_s=0.0002,
            dram_s=0.0001,
            token_s=0.00025,
            read_buffer_bytes=8192,
            pinned_bytes=4080,
        ),
        max_logit_error=1e-3,
        top1_agreement=0.95,
        top1_agreement_error=0.01,
        divergence=Divergence(
            mean_kld=0.02, mean_kld_error=0.001, p999_kld=0.9, max_kld=1.5, rms_delta_p=0.04, rms_delta_p_error=0.002
        ),
        simulated_equals_real=True,
        sample=Sample(prompt="A cat's", text=" paw <b>", max_new_tokens=3, temperature=0.6, seed=7),
        ladder=LADDER,
        run=tiny_run(plans),
        read_lengths=(
            ReadLength(least_bytes=4096, reads=400, read_bytes=1_638_400),
            ReadLength(least_bytes=16384, reads=100, read_bytes=2_457_600),
        ),
        process_bytes=60_000_000,
        tokens_per_s_deviation=12.5,
    )


PROVENANCE = Provenance(
    compiler_version="0.1.0",
    commit="0123456789" * 4,
    dirty=True,
    python_version="3.11.7",
    libraries={"numpy": "2.4.6", "torch": "2.13.0"},
)


def tiny_figures(**figures: Any) -> PlanFigures:
    """Returns the figures of a plan other than the largest; `figures` replace fields."""
    values: dict[str, Any] = {
        "plan": "1gb",
        "dram_budget_bytes": 10**9,
        "dram_used_bytes": 10**9,
        "method": "topk",
        "cache": "lfu",
    }
    values |= {"density": 0.1, "holds_everything": False, "ppl_artifact": 8.8, "ppl_artifact_error": 0.7}
    values |= {"ppl_ratio": 1.1, "ppl_ratio_error": 0.003, "top1_agreement": 0.9, "mean_kld": 0.1}
    values |= {"reads_per_token": 9.0, "flash_bytes_per_token": 9e4, "hit_rate": 0.2, "modelled_tokens_per_s": 7.0}
    return PlanFigures(**(values | {"simulated_equals_real": True} | figures))


DRAFTS = PlanDrafts(plan="default", draft="lookup", drafted=(2, 3, 0, 3), accepted=(2, 1, 0, 3), same_tokens=True)


@dataclass
class Build:
    """A build from weights to a packaged artifact, with each stage's record."""

    folder: Path
    method: Method = "topk"
    format_name: FormatName = "int8_group32"
    cache: str = "lru"
    collapse: Collapse = "static"
    layers_per_job: int = 2
    num_pinned: int = 3
    page_bytes: int = 4096
    spec: ModelSpec = field(default_factory=tiny_spec)
    budget_share: float = 0.5
    layers_per_group: int = 1
    source: Model | None = None
    """The model to build; None: a tiny one of shape `spec`."""
    predictor_format: FormatName = "int8_group32"
    whole_layers: tuple[int, ...] = ()
    """Layers that use all their units."""
    smaller: tuple[tuple[float, float], ...] = ()
    """(budget_share, density) of plans, largest budget first."""
    draft: str = "off"
    """A file of runtime/drafts."""
    name: str = "tiny.coldpress"
    head: FormatName | None = None
    """The head's own format."""

    def __post_init__(self) -> None:
        """Makes every record but that of `package`."""
        records = self.folder / "records"
        self.model = self.source or tiny_model(self.folder / "model", self.spec)
        self.spec = self.model.spec
        self.device = tiny_device(self.page_bytes)
        self.corpus = tiny_corpus(records, self.spec.vocab_size)
        sparsity = tiny_sparsity(
            self.model,
            self.method,
            self.format_name,
            self.budget_share,
            predictor_format=self.predictor_format,
            whole_layers=self.whole_layers,
            layers_per_group=self.layers_per_group,
        )
        head = HeadFormat(role=self.spec.head_role, format=self.head) if self.head else None
        sparsity = sparsity.model_copy(update={"cache": self.cache, "head": head})
        self.sparsity = with_smaller(
            fitted(sparsity, self.spec, records), [self._decision(*decision) for decision in self.smaller]
        )
        self.placement = tiny_placement(records, self.model, self.sparsity, self.num_pinned)
        self.predictors = tiny_predictors(records, self.model, self.sparsity)
        self.quantized = tuple(self._quantize(chunk) for chunk in self.chunks())
        self.order = tuple(tiny_order(records, self.model, self.sparsity, chunk) for chunk in self.chunks())
        predictors = self.predictors if self.method == "predictor" else None
        records = self.model, self.sparsity, self.placement, self.device, predictors, self.order
        laid = lay_out(*records, corpus=self.corpus, collapse=self.collapse, draft=self.draft)
        self.layout, self.plans = laid.layout, laid.made

    def _decision(self, budget_share: float, density: float) -> Sparsity:
        decision = tiny_sparsity(self.model, self.method, self.format_name, budget_share, density)
        decision = decision.model_copy(update={"cache": self.cache})
        folder = self.folder / "records" / f"decision-{budget_share}"
        return fitted(decision, self.spec, folder)

    def chunks(self) -> list[tuple[int, ...]]:
        """Returns the layer numbers of each job."""
        layers, step = tuple(range(self.spec.num_hidden_layers)), self.layers_per_job
        return [layers[start : start + step] for start in range(0, len(layers), step)]

    def _quantize(self, layers: tuple[int, ...]) -> Quantized:
        work = Workspace(self.folder / "records" / f"quantized-{layers[0]:03d}", "fingerprint")
        return run_quantize(QuantizeConfig(), self.model, self.sparsity, layers, work)

    @property
    def artifact(self) -> Path:
        """The folder that `package` writes."""
        return self.folder / self.name

    def package(self, **changes: Any) -> Package:
        """Writes the artifact, keeps its record in `record` and returns it; `changes` replace input records."""
        records: dict[str, Any] = {
            "model": self.model,
            "corpus": self.corpus,
            "sparsity": self.sparsity,
            "device": self.device,
            "layout": self.layout,
            "plans": self.plans,
            "order": self.order,
            "placement": self.placement,
            "quantized": self.quantized,
            "predictors": self.predictors if self.method == "predictor" else None,
        }
        self.record = run_package(PackageConfig(artifact=str(self.artifact)), **(records | changes))
        return self.record


@dataclass(frozen=True)
class Laid:
    """The decisions of `layout` and `plan`."""

    layout: Layout
    made: Plans

    @property
    def sections(self) -> tuple[Section, ...]:
        return self.layout.sections

    @property
    def plans(self) -> tuple[Plan, ...]:
        return self.made.plans


NO_TEXT = Corpus(name="none", text_sha256="0" * 64, splits=())


def lay_out(
    model: Model,
    sparsity: Sparsity,
    placement: Placement,
    device: DeviceProfile,
    predictors: Predictors | None = None,
    order: Sequence[Order] = (),
    activations: Activations | None = None,
    corpus: Corpus = NO_TEXT,
    drafter: Drafter | None = None,
    **config: Any,
) -> Laid:
    """Runs both stages; `config` are settings of `plan`, whose cache is that of `sparsity` unless given. Drafts are off
    unless given."""
    layout = layout_stage.run(layout_stage.LayoutConfig(), model, sparsity, device)
    given = {"cache": sparsity.cache, "draft": "off", **config}
    records = model, sparsity, placement, layout, tuple(order), device, predictors, activations, corpus, drafter
    return Laid(layout, plan_stage.run(plan_stage.PlanConfig.model_validate(given), *records))


def contents(folder: Path) -> dict[str, str]:
    """Returns relative path -> sha256 of every file below `folder`."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def manifest_of(
    model: Model,
    sparsity: Sparsity,
    placement: Placement,
    device: DeviceProfile,
    laid: Laid,
    predictors: tuple[LayerPredictor, ...] = (),
) -> Manifest:
    """Returns the manifest that `package` would write for a layout, to test the reader's rules without files."""
    nowhere = ArrayFile(array_file="", sha256="0" * 64)
    families = families_of(sparsity.method, model.spec)
    resident = resident_tensors(model, families, sparsity.format)

    def within(prefix):
        return tuple(one for one in resident if one.role.startswith(prefix))

    numbers = range(model.spec.num_hidden_layers)
    layers = tuple(LayerCodes(layer=at, arrays=nowhere, resident=within(f"layers.{at}.")) for at in numbers)
    codes = Codes("rtn", layers, nowhere, tuple(one for one in resident if one not in within("layers.")))
    corpus = Corpus(name="tiny", text_sha256="0" * 64, splits=())
    inputs = DocumentInputs(model, corpus, sparsity, device, laid.layout, laid.made, (), placement, codes, predictors)
    written = Written(Path("nowhere"))
    sizes = {FLASH_FILE: laid.layout.flash_bytes, RESIDENT_FILE: 1, TABLES_FILE: 1} | (
        {PREDICTORS_FILE: 1} if predictors else {}
    )
    written.files = [ArtifactFile(path=name, size_bytes=size, sha256="0" * 64) for name, size in sizes.items()]
    return make_manifest(inputs, written, {})
