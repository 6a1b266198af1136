"""Measures compiler/quote/reference.json: signals by kind of model, and what formats cost language models in use.

    python -m benchmarks.shared.reference SWIGLU RELU [MODEL …]
    python -m benchmarks.shared.reference --mixes MODEL …

Takes two calibrated build folders and those of language models, built with method=auto; without any, keeps those that
the file has. `--mixes` takes builds of these models' quantized files in less DRAM than they fit in, and adds the losses
of formats by matrix and of heads. compiler/quote/reference.py says what the figures are, and draws signals from them.
"""

import datetime
import math
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy.special import ndtri

from coldpress.compiler.activity.unit_statistics import NORMS
from coldpress.compiler.candidates import candidates
from coldpress.compiler.cost_model import slice_bytes
from coldpress.compiler.io import Workspace, load_arrays, load_record, replacing
from coldpress.compiler.quote.reference import FILE, Kind, MixLoss, RealModel, Reference, SignalStatistics, reference
from coldpress.compiler.shared_settings import MAX_PPL_RATIO
from coldpress.compiler.stages.explore import ExploreConfig, explored
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves, FormatLoss, Loss
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.sparsity import Sparsity

POWERS = np.linspace(1, 3, 81)
"""Exponents of f that a kurtosis is looked up in."""


def statistics_of(values: np.ndarray) -> SignalStatistics:
    """Returns the statistics of a signal, [num_tokens, num_units]."""
    values = values.astype(np.float64)
    scale = np.sqrt((values**2).mean(axis=0))
    values, scale = values[:, scale > 0], scale[scale > 0]
    z = values / scale
    shares = np.clip((values != 0).mean(axis=0), 0.5 / len(values), 1 - 0.5 / len(values))
    density = float((values != 0).mean())
    return SignalStatistics(
        log_scale_std=float(np.log(scale).std()),
        power=_power((z**4).mean()) if density > 0.99 else 1.0,
        correlation=float(np.clip(_lag(z), 0, 0.99)),
        density=1.0 if density > 0.99 else density,
        bound_std=0.0 if density > 0.99 else float(ndtri(shares).std()),
    )


def _lag(z: np.ndarray) -> float:
    """Returns the correlation between neighbouring tokens, mean over units."""
    centred = z - z.mean(axis=0)
    return float((centred[1:] * centred[:-1]).mean() / (centred**2).mean())


def _power(kurtosis: float) -> float:
    """Returns the p for which |z|^p of a Gaussian z has this kurtosis: E z^4p / (E z^2p)^2."""
    kurtoses = [moment(4 * p) / moment(2 * p) ** 2 for p in POWERS]
    return float(np.interp(kurtosis, kurtoses, POWERS))


def moment(power: float) -> float:
    """Returns E |z|^power of a Gaussian z."""
    return 2 ** (power / 2) * math.gamma((power + 1) / 2) / math.sqrt(math.pi)


def kind_from(curves: Curves, num_parameters: int) -> Kind:
    """Returns the figures of an explored model."""
    of_signal: dict[str, list[SignalStatistics]] = {}
    for name, values in load_arrays(curves.trace).items():
        if not name.endswith(NORMS):
            of_signal.setdefault(name.partition(".")[2], []).append(statistics_of(values))
    signals = {
        name: SignalStatistics(
            **{key: float(np.mean([getattr(one, key) for one in found])) for key in SignalStatistics.model_fields}
        )
        for name, found in of_signal.items()
    }
    return Kind.model_validate(
        {
            "num_parameters": num_parameters,
            "num_tokens": curves.num_tokens,
            "block_tokens": curves.block_tokens,
            "curves": curves.curves,
            "formats": curves.formats,
            "kv_caches": curves.kv_caches,
            "unexplored": curves.unexplored,
            "signals": signals,
        }
    )


def _kind(build: Path, work: Workspace) -> Kind:
    """Explores the model of a build folder."""
    model = load_record(build / "ingest.json", Model)
    corpus = load_record(build / "tokenize.json", Corpus)
    activations = load_record(build / "calibrate.json", Activations)
    methods, config = candidates(model.spec, {}), ExploreConfig(method="auto")
    cores = len(os.sched_getaffinity(0))
    curves = explored(methods, config, model, corpus, activations, work, cores, as_large(model.spec))
    return kind_from(curves, model.num_parameters)


def _real(build: Path) -> RealModel:
    """Reads the losses of an explored build folder."""
    curves, model = load_record(build / "explore.json", Curves), load_record(build / "ingest.json", Model)
    return RealModel(
        name=model.name,
        num_parameters=model.num_parameters,
        num_tokens=curves.num_tokens,
        formats=curves.formats,
        kv_caches=curves.kv_caches,
    )


def _with_mix(known: RealModel, model: Model, build: Path) -> RealModel:
    """Adds the losses of heads, and of the smallest formats by matrix that keep max_ppl_ratio, from a model's build."""
    (curves,) = (load_record(file, Sparsity).curves for file in build.glob("*/allocate.json"))
    assert curves is not None
    mixes = [
        MixLoss(bits=_bits(loss, model), **loss.model_dump(include={*Loss.model_fields}))
        for loss in curves.formats
        if loss.expected and loss.ppl_ratio + (loss.ppl_ratio_error or 0.0) <= MAX_PPL_RATIO
    ]
    mix = min(mixes, key=lambda loss: loss.bits)
    return known.model_copy(update={"heads": curves.heads, "mix": mix})


def _bits(loss: FormatLoss, model: Model) -> float:
    """Returns the bits of a weight of formats by matrix."""
    shapes = {one.role: model.tensors[one.role].shape for one in loss.expected}
    nbytes = sum(shapes[one.role][0] * slice_bytes(shapes[one.role][1], one.format) for one in loss.expected)
    return 8 * nbytes / sum(map(math.prod, shapes.values()))


def as_large(spec: ModelSpec) -> ModelSpec:
    """Returns the shape with units of a 7B's size (Llama-2)."""
    return spec.model_copy(update={"hidden_size": 4096, "intermediate_size": 11008})


def main(argv: list[str]) -> int:
    """Writes reference.json from two build folders, and those of language models; without any, keeps those it has."""
    if argv[:1] == ["--mixes"]:
        return _mixed(map(Path, argv[1:]))
    with tempfile.TemporaryDirectory() as folder:
        smooth, exact = (_kind(Path(name), Workspace(Path(folder) / Path(name).name, "")) for name in argv[:2])
    found = sorted((_real(Path(name)) for name in argv[2:]), key=lambda one: one.num_parameters)
    command = (
        "snakemake --config model=<7.3M, SwiGLU or ReLU> corpus=<WikiText-2> -- calibrate; benchmarks.shared.reference"
    )
    real = tuple(found) or reference().real
    _write(Reference(command=command, date=f"{datetime.date.today()}", smooth=smooth, exact_zeros=exact, real=real))
    return 0


def _mixed(builds: Iterable[Path]) -> int:
    known = {one.num_parameters: one for one in reference().real}
    for build in builds:
        model = load_record(build / "ingest.json", Model)
        known[model.num_parameters] = _with_mix(known[model.num_parameters], model, build)
    _write(reference().model_copy(update={"real": tuple(known.values())}))
    return 0


def _write(made: Reference) -> None:
    with replacing(FILE) as temporary:
        temporary.write_text(made.to_json(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
