"""Finds the inputs of a quote: a model's shapes, its quality curves, and signals of its tokens. No weight is read.

An artifact carries curves.json and trace.safetensors.zst; a build folder has the records of `explore` and `calibrate`;
of any other `model=` only config.json is read. Without measured curves, signals are drawn with the statistics of a
small model of the same kind, formats lose what they lose on a language model of that size, and the loss of leaving out
units is unknown. Without a calibration its statistics are counted in the trace.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from coldpress.compiler.activity.layer_counts import countable_families, exact_families, leaders
from coldpress.compiler.activity.signals import magnitude_edges, magnitude_histogram, pack_nonzero
from coldpress.compiler.candidates import AUTO, DENSE, candidates
from coldpress.compiler.checkpoint.hub import snapshot
from coldpress.compiler.checkpoint.packages import fetch
from coldpress.compiler.checkpoint.shapes import Shapes, read_shapes
from coldpress.compiler.io import load_arrays, load_record, save_arrays
from coldpress.compiler.quote.records import Basis
from coldpress.compiler.quote.reference import Kind, RealModel, drawn_trace, kind_of, real_like
from coldpress.compiler.seconds import NO_DIGEST
from coldpress.compiler.shared_settings import MAX_PPL_RATIO
from coldpress.compiler.workflow.settings import CONFIG_FILE, BuildConfig, ModelReference, resolve
from coldpress.runtime.artifact.reader import Artifact, load_curve, open_artifact
from coldpress.runtime.dram.kv_cache import formats_of
from coldpress.runtime.sparsity import used_experts
from coldpress.schemas.activations import Activations, FamilyStatistics, LayerStatistics
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.curves import Curves, Unexplored
from coldpress.schemas.errors import ArtifactError, ColdpressError
from coldpress.schemas.families import WHOLE_MLP, activity_of, layers_of, num_units, slices, unit_keys
from coldpress.schemas.manifest import CURVES_FILE, MANIFEST_FILE, TRACE_FILE, Manifest
from coldpress.schemas.model import FREQUENCIES, Model, ModelSpec, TensorSource, matrices, role_shape
from coldpress.schemas.sparsity import Sparsity

DRAWN_TOKENS = 128
MAX_CURVES_BYTES = 16 << 20
MODELS = ("ingest.json", "relufy.json")
RECORDS = ("ingest.json", "calibrate.json", "explore.json")


@dataclass(frozen=True)
class QuoteSource:
    kind: Literal["artifact", "build", "config"]
    model: Model
    """Shapes; a model without files, except where a build folder has its record."""
    activations: Activations
    curves: Curves
    basis: Basis
    basis_in_words: str
    settings: Mapping[str, Any]
    """The settings of `allocate`, without the device's own budget."""
    given: Mapping[str, str]
    """The keys that were given, and those that name the model."""
    folder: Path
    build: BuildConfig | None
    """Settings of a build of the model; None for an artifact."""
    artifact_bytes: int | None = None
    draft: Shapes | None = None
    """The draft model's shapes; None without one."""

    @property
    def max_ppl_ratio(self) -> float | None:
        """The largest perplexity over the source's that a choice may have; None for any, and if the method is given."""
        most = self.settings.get("max_ppl_ratio", MAX_PPL_RATIO)
        return most if self.settings["method"] == AUTO and most != "off" else None


def find(named: str, keys: Mapping[str, str], folder: Path) -> QuoteSource:
    """Finds the inputs of a quote of `named`, and writes traces and statistics into `folder`. Raises ColdpressError if
    `named` is no artifact, no build folder and nothing that `model=` takes, or a key is refused, ArtifactError if it is
    damaged."""
    path = Path(named).expanduser()
    if (path / MANIFEST_FILE).exists():
        return _of_artifact(path, keys, folder)
    if (path / "ingest.json").exists():
        return _of_build(path, keys, folder)
    return _of_config(named, keys, folder)


def _resolved(model: str, keys: Mapping[str, str], known: ModelReference | None = None) -> BuildConfig:
    """Resolves a build on any device. A quote reads no text, so that the commit of a corpus does not matter yet."""
    return resolve({"model": model, "device": "host", "corpus": "pydoc", **keys}, known)


def _settings(build: BuildConfig) -> dict[str, Any]:
    found = build.of_stage("allocate")
    if found["dram_budget"] == build.device.dram_budget_bytes.value:  # not of a quoted device
        del found["dram_budget"]
    return found


def _of_build(path: Path, keys: Mapping[str, str], folder: Path) -> QuoteSource:
    missing = [name for name in RECORDS if not (path / name).exists()]
    if missing:
        raise ColdpressError(
            f"{path} has no {' and no '.join(missing)}, which a quote reads; build with method=auto first, or quote "
            "the model itself"
        )
    curves = load_record(path / RECORDS[2], Curves)
    models = [load_record(path / name, Model) for name in MODELS if (path / name).exists()]
    model = next((one for one in models if one.weights_sha256 == curves.weights_sha256), None)
    if model is None:
        raise ColdpressError(f"{path}/explore.json belongs to other weights than {' or '.join(MODELS)}; build again")
    choices = (load_record(file, Sparsity).curves for file in sorted(path.glob("*/allocate.json")))
    later = (one for one in choices if one is not None and one.weights_sha256 == curves.weights_sha256)
    curves = curves.with_losses_of(max(later, key=lambda one: len(one.curves), default=None))
    build = _resolved(model.folder, keys)
    return QuoteSource(
        "build",
        model,
        load_record(path / RECORDS[1], Activations),
        curves,
        "measured",
        f"curves of this model, {curves.num_tokens} tokens of validation text (stages explore and allocate)",
        _settings(build),
        {**_origin(model.name, model.source, model.revision), **keys},
        folder,
        build,
        draft=_draft_of(build),
    )


def _of_config(named: str, keys: Mapping[str, str], folder: Path) -> QuoteSource:
    build = _resolved(named, keys)
    shapes = _shapes_of(build.model)
    model = _without_files(
        shapes.spec, build.model.name, {role: tensor.shape for role, tensor in shapes.tensors.items()}, NO_DIGEST
    )
    found = _guessed("config", model, _settings(build), {"model": named, **keys}, build, folder)
    return replace(found, draft=_draft_of(build))


def _draft_of(build: BuildConfig) -> Shapes | None:
    return None if build.draft is None else _shapes_of(build.draft.model)


def _shapes_of(reference: ModelReference) -> Shapes:
    """Returns the shapes of a model by its config.json or GGUF file alone."""
    if reference.packages is not None:
        fetch(reference.packages, lambda line: print(line, file=sys.stderr))
    if reference.revision is None:
        given = Path(reference.source)
        config = given if given.is_file() else given / CONFIG_FILE
    else:
        config = snapshot(reference.source, reference.revision, offline=False, patterns=[CONFIG_FILE]) / CONFIG_FILE
    return read_shapes(config)


def _of_artifact(path: Path, keys: Mapping[str, str], folder: Path) -> QuoteSource:
    artifact = open_artifact(path)
    manifest, name = artifact.manifest, artifact.manifest.source.name
    given = {**_origin(name, manifest.source.source, manifest.source.revision), **keys}
    model = _without_files(manifest.model, name, _shapes(manifest), manifest.source.weights_sha256)
    size = sum(file.size_bytes for file in manifest.files)
    usual = {"context_length": str(manifest.plans[0].context_length)}
    build = _resolved(name, usual | dict(keys), _reference(name, model))
    settings, draft = _settings(build), _draft_of(build)
    curves = _carried(artifact, path)
    if curves is None:
        guessed = _guessed("artifact", model, settings, given, None, folder)
        return replace(guessed, artifact_bytes=size, draft=draft)
    # the curves may be those of the model before it was distilled
    curves = curves.model_copy(update={"weights_sha256": model.weights_sha256})
    words = f"curves that the artifact carries, {curves.num_tokens} tokens of validation text (stage explore)"
    activations = activations_of(curves, model.spec, folder).model_copy(update={"experts": load_curve(artifact)})
    return QuoteSource(
        "artifact", model, activations, curves, "measured", words, settings, given, folder, None, size, draft
    )


def _reference(name: str, model: Model) -> ModelReference:
    spec = model.spec
    return ModelReference(
        name=name,
        source=model.source,
        revision=None,
        license=None,
        model_type=spec.model_type,
        num_hidden_layers=spec.num_hidden_layers,
        exact_zeros=spec.exact_zeros,
    )


def _carried(artifact: Artifact, path: Path) -> Curves | None:
    """Returns the curves that an artifact carries, its trace checked against the manifest; None if it has none."""
    listed = {entry.path: entry for entry in artifact.manifest.files}
    if CURVES_FILE not in listed or TRACE_FILE not in listed:
        return None
    try:
        curves = Curves.model_validate_json(artifact.read_bytes(CURVES_FILE, MAX_CURVES_BYTES))
    except ValidationError as error:
        found = error.errors()[0]
        place = ".".join(map(str, found["loc"]))
        raise ArtifactError(
            f"{path / CURVES_FILE}: {place}: {found['msg']}, of an older version; build it again"
        ) from error
    trace = ArrayFile(array_file=str((path / TRACE_FILE).absolute()), sha256=listed[TRACE_FILE].sha256)
    return curves.model_copy(update={"trace": trace})


def _guessed(
    source: Literal["artifact", "config"],
    model: Model,
    settings: Mapping[str, Any],
    given: Mapping[str, str],
    build: BuildConfig | None,
    folder: Path,
) -> QuoteSource:
    kind, real = kind_of(model.spec), real_like(model.num_parameters)
    curves = _borrowed(kind, real, model, folder)
    basis: Basis = "same kind of model" if kind else "none"
    words = f"not measured: its quality is unknown until built; formats are those that keep {real.in_words}"
    if kind and model.spec.exact_zeros:
        words += f", and zeros are those of a test model ({kind.num_parameters / 1e6:.0f}M parameters)"
    activations = activations_of(curves, model.spec, folder)
    return QuoteSource(source, model, activations, curves, basis, words, settings, given, folder, build)


def _borrowed(kind: Kind | None, real: RealModel, model: Model, folder: Path) -> Curves:
    """Returns curves of a model that was not measured, and writes a trace drawn with the kind's statistics into
    `folder`; `kind` None allows dense runs only. Formats lose what `real` lost. The loss of leaving out units is
    unknown: it differs among models by more than any floor."""
    spec, reason = model.spec, "what it would lose is unknown until a build measures it"
    having = layers_of(WHOLE_MLP, spec)
    layers = (having[len(having) // 2],)
    if kind is None:
        trace = {f"{layers[0]}.none": np.zeros((DRAWN_TOKENS, 1), np.float16)}
        lossy, kv_caches = [name for name in candidates(spec, {}) if name != DENSE], set[str]()
    else:
        trace = drawn_trace(spec, kind, layers, DRAWN_TOKENS)
        lossy = [one.method for one in (*kind.curves, *kind.unexplored)] + [*candidates(spec, {})]
        kv_caches = {loss.kv_cache for loss in kind.kv_caches} & {*formats_of(spec)}
    found = Curves(
        weights_sha256=model.weights_sha256,
        num_tokens=kind.num_tokens if kind else 1,
        block_tokens=kind.block_tokens if kind else 1,
        curves=(),
        formats=(),
        kv_caches=tuple(loss for loss in real.kv_caches if loss.kv_cache in kv_caches),
        unexplored=tuple(Unexplored(method=name, reason=reason) for name in dict.fromkeys(lossy)),
        trace=save_arrays(folder / "trace.safetensors", trace),
        trace_layers=layers,
    )
    return found.model_copy(update=real.losses(spec))


def _origin(name: str, source: str, revision: str | None) -> dict[str, str]:
    """Returns the keys that name a model; a folder's path is in no record."""
    return {"model": source, "revision": revision} if revision else {"model": f"<folder of {name}>"}


def _without_files(spec: ModelSpec, name: str, shapes: Mapping[str, tuple[int, ...]], weights_sha256: str) -> Model:
    sources = {
        role: TensorSource(file="", tensor=role, row_start=0, row_stop=shape[0], shape=shape)
        for role, shape in shapes.items()
    }
    return Model(
        spec=spec,
        name=name,
        source="local",
        revision=None,
        license=None,
        folder="",
        tensors=sources,
        files=(),
        weights_sha256=weights_sha256,
        num_parameters=sum(map(prod, shapes.values())),
    )


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    spec = manifest.model
    found = {tensor.role: tensor.shape for tensor in manifest.resident if tensor.role not in FREQUENCIES.values()}
    for layer, family in unit_keys([entry.family for entry in manifest.families], spec):
        for piece in slices(family, spec):
            for name in matrices(piece.role, spec):
                role = f"layers.{layer}.{name}.weight"
                found[role] = role_shape(spec, role)
    return found


def activations_of(curves: Curves, spec: ModelSpec, folder: Path) -> Activations:
    """Returns activation statistics as `calibrate` writes them, counted in the trace, for each layer in the nearest
    traced one; files go into `folder`."""
    trace = load_arrays(curves.trace)
    traced = {layer: _families(trace, layer, spec, folder) for layer in curves.trace_layers}
    signal = next(name for name in trace if name.count(".") == 1)
    return Activations(
        num_tokens=len(trace[signal]),
        exact_zeros=spec.exact_zeros,
        weights_sha256=curves.weights_sha256,
        layers=tuple(
            LayerStatistics(
                layer=layer,
                families=tuple(
                    found
                    for found in traced[min(traced, key=lambda known: (abs(known - layer), known))]
                    if layer in layers_of(found.family, spec)
                ),
                inputs=curves.trace,
                input_similarity=None,
            )
            for layer in range(spec.num_hidden_layers)
        ),
    )


def expert_shares(curves: Curves, spec: ModelSpec) -> np.ndarray | None:
    """Returns the share of a trace's tokens that use each expert, float64 [traced layers, E]; None for a model without
    experts, or a trace without the signal that shows them."""
    trace = load_arrays(curves.trace) if spec.is_mixture else {}
    names = [f"{layer}.{activity_of(WHOLE_MLP, spec)}" for layer in curves.trace_layers]
    found = [used_experts(trace[name], spec.num_experts).mean(axis=0) for name in names if name in trace]
    return np.stack(found) if found else None


def _families(
    trace: Mapping[str, np.ndarray], layer: int, spec: ModelSpec, folder: Path
) -> tuple[FamilyStatistics, ...]:
    families = tuple(name for name in countable_families(spec) if f"{layer}.{activity_of(name, spec)}" in trace)
    exact, found = exact_families(families, spec), dict[str, FamilyStatistics]()
    for leader, same in leaders(families, spec).items():
        values = trace[f"{layer}.{activity_of(leader, spec)}"].astype(np.float32)
        density, arrays = _counted(values, leader in exact, folder / f"{layer}.{leader}.safetensors")
        for family in same:
            found[family] = FamilyStatistics(
                family=family, num_units=num_units(family, spec), density=density, arrays=arrays
            )
    return tuple(found[family] for family in families)


def _counted(values: np.ndarray, is_exact: bool, path: Path) -> tuple[float | None, ArrayFile]:
    """Returns the density, where zeros are exact, and the arrays of a signal, float32 [num_tokens, num_units]."""
    keys = values.view(np.uint32)
    arrays = {"magnitude_histogram": magnitude_histogram(keys).astype(np.uint64)}
    arrays["magnitude_edges"] = magnitude_edges()
    if not is_exact:
        return None, save_arrays(path, arrays)
    counts = np.count_nonzero(values, axis=0)
    arrays |= {"bits": pack_nonzero(keys), "counts": counts.astype(np.int64)}
    return int(counts.sum()) / values.size, save_arrays(path, arrays)
