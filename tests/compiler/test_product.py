"""Every architecture, every selector and every format at least once: compiled by the stages, run, and held against the
evaluation. `make test` takes every twelfth case. `python -m benchmarks.product` is the whole product."""

from pathlib import Path

import pytest

from coldpress.compiler.io import load_record
from coldpress.compiler.stages import verify
from coldpress.compiler.stages.verify import VerifyConfig
from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.package import Package
from coldpress.schemas.predictors import Predictors
from tests.support.kernels import formats_of
from tests.support.models import MIXTURES, MODEL_TYPES
from tests.support.product import Case, Source, compiled, difference, has_attention, has_zeros_for, source_of

METHODS, FORMATS = plugins.names("coldpress.runtime.sparsity"), formats_of(32)
ONE_MLP = [name for name in MODEL_TYPES if name not in MIXTURES]
CASES = [
    Case(ONE_MLP[number % len(ONE_MLP)], method, FORMATS[number % len(FORMATS)])
    for number, method in enumerate(METHODS)
]
CASES += [
    Case(name, method, "int4_group32")
    for name in MIXTURES
    for method in ("dense", "topk", "relu", "flash", "predictor")
    if has_zeros_for(name, method)
]
CASES += [Case("llama", method, "int8_group32", attention=True) for method in METHODS if has_attention(method)]


@pytest.fixture(scope="module")
def sources() -> dict[tuple[str, bool], Source]:
    return {}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if number % 12 else []) for number, case in enumerate(CASES)],
    ids=lambda case: f"{case.architecture}-{case.method}-{case.format}{'-attention' * case.attention}",
)
def test_the_runtime_computes_what_is_evaluated(
    case: Case,
    sources: dict[tuple[str, bool], Source],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    key = (case.architecture, case.relu)
    if key not in sources:
        sources[key] = source_of(tmp_path_factory.mktemp("source"), *key)
    found = difference(compiled(sources[key], case, tmp_path / "build"), sources[key], tmp_path / "codes")
    assert found.equal, found
    if not plugins.load("coldpress.runtime.sparsity", Selector, case.method).EXACT:
        assert found.left_out > 10 * found.median, found


class WithZeros(Case):
    """Of a model of the ReLU family, whatever the selector."""

    relu = True  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [pytest.param(Case, marks=pytest.mark.slow), WithZeros], ids=["silu", "relu"])
def test_a_mixture_with_predictors_is_verified(kind: type[Case], tmp_path: Path) -> None:
    """The last stage reads every byte, decodes the test text, and replays it in the simulator, which decides alike."""
    case = kind("mixtral", "predictor", "fp16")
    source = source_of(tmp_path / "source", "mixtral", case.relu)
    artifact = compiled(source, case, tmp_path / "build")
    spec, predictors = source.model.spec, load_record(tmp_path / "build" / "size.json", Predictors)
    manifest = open_artifact(artifact).manifest
    assert [entry.rank for entry in manifest.predictors] == [entry.rank for entry in predictors.layers]
    assert manifest.plans[0].predictor_bytes == sum(entry.nbytes for entry in predictors.layers)
    used = spec.num_experts_per_tok / spec.num_experts
    assert all(0 < entry.density < entry.predicted_density <= used for entry in predictors.layers)
    assert all(part.density < used for part in manifest.plans[0].parts)
    package = load_record(tmp_path / "build" / "package.json", Package)
    corpus = load_record(source.folder / "tokenize.json", Corpus)
    found = verify.run(VerifyConfig(), source.model, source.model, corpus, package)
    assert found.simulated_equals_real
    assert found.run.misses > 0
    if kind is Case:
        assert difference(artifact, source, tmp_path / "codes").equal
    else:
        assert found.ppl_artifact == pytest.approx(found.ppl_source, rel=0.02)
