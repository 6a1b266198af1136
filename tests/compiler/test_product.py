"""Every architecture, every selector and every format at least once: compiled by the stages, run, and held against the
evaluation. `python -m tests.benchmarks.product` is the whole product."""

from pathlib import Path

import pytest

from runtime import _plugins
from tests.support.models import MIXTURES, MODEL_TYPES
from tests.support.product import Case, Source, compiled, difference, source_of

METHODS, FORMATS = _plugins.names("runtime.sparsity"), _plugins.names("runtime.quantization")
ONE_MLP = [name for name in MODEL_TYPES if name not in MIXTURES]
CASES = [
    Case(ONE_MLP[number % len(ONE_MLP)], method, FORMATS[number % len(FORMATS)])
    for number, method in enumerate(METHODS)
]
CASES += [
    Case(name, method, "int4_group32")
    for name in MIXTURES
    for method in ("dense", "topk", "relu", "flash", "predictor")
]


@pytest.fixture(scope="module")
def sources() -> dict[tuple[str, bool], Source]:
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.architecture}-{case.method}-{case.format}")
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
    if not _plugins.load("runtime.sparsity", case.method).EXACT:
        assert found.left_out > 10 * found.median, found
