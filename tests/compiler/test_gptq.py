"""gptq: the error factor, Algorithm 1 against the plain elimination that it stands for, and what it is better at."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from coldpress.compiler.rounding import gptq, rtn
from coldpress.compiler.rounding._weights import Weights
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._groups import GroupFormat
from coldpress.schemas.errors import ColdpressError

FORMATS = names("coldpress.runtime.quantization")
INPUTS, OUTPUTS, TOKENS = 160, 72, 400


@pytest.fixture(scope="module")
def activations() -> np.ndarray:
    """float32 [TOKENS, INPUTS], correlated as real ones are, a few of them large, one never used."""
    random = np.random.default_rng(1)
    values = random.standard_normal((TOKENS, 24)) @ random.standard_normal((24, INPUTS))
    values += 0.3 * random.standard_normal((TOKENS, INPUTS))
    values[:, ::17] *= 5
    values[:, 7] = 0
    return values.astype(np.float32)


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    """A weight float32 [OUTPUTS, INPUTS]."""
    return np.random.default_rng(2).standard_normal((OUTPUTS, INPUTS)).astype(np.float32) * np.float32(0.05)


def gram(activations: np.ndarray) -> np.ndarray:
    return activations.T @ activations


def sliced(matrix: np.ndarray, axis: str, gram: np.ndarray | None) -> Weights:
    slices = np.ascontiguousarray(matrix if axis == "row" else matrix.T)
    return Weights(len(slices), slices.shape[1], axis, lambda start, stop: slices[start:stop], gram)


def decoded(algorithm, matrix: np.ndarray, axis: str, format_name: str, gram: np.ndarray | None) -> np.ndarray:
    """What codes say, float32 [OUTPUTS, INPUTS]."""
    weights = sliced(matrix, axis, gram)
    values = load("coldpress.runtime.quantization", Format, format_name).decode(
        algorithm.Plugin().quantize(weights, format_name), weights.length
    )
    return values if axis == "row" else values.T


def test_the_factor_is_that_of_the_damped_inverse(activations):
    factor = gptq.error_factor(gram(activations)).astype(np.float64)
    assert np.array_equal(factor, np.triu(factor))
    damped = gram(activations).astype(np.float64)
    damped += np.diag(np.where(np.diag(damped) > 0, 0.01 * np.diag(damped).mean(), 1))
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(INPUTS), atol=2e-3)


def test_what_is_no_gram_matrix_is_refused():
    wrong = -np.eye(4, dtype=np.float32)
    wrong[0, 1] = wrong[1, 0] = 9
    with pytest.raises(ColdpressError, match="not positive definite, expected a sum of x x"):
        gptq.error_factor(wrong)


def test_a_matrix_that_is_singular_in_float32_is_damped_more(caplog):
    row = np.linspace(1, 3, 64, dtype=np.float32)
    almost = np.outer(row, row) * np.float32(1e6)
    almost -= np.eye(64, dtype=np.float32) * np.float32(2e5)
    with caplog.at_level("INFO"):
        factor = gptq.error_factor(almost)
    assert np.isfinite(factor).all()
    assert "damped by 0.1" in caplog.text


def plain(matrix: np.ndarray, gram: np.ndarray, axis: str, format_name: str) -> np.ndarray:
    """The elimination that GPTQ computes faster (Optimal Brain Quantization, in a fixed order), in float64.

    One input after another is rounded; the others take up its error as the inverse of the Hessian of what remains says.
    """
    kept = load("coldpress.runtime.quantization", Format, format_name)
    weights = matrix.astype(np.float64)
    hessian = gram.astype(np.float64)
    hessian += np.diag(np.where(np.diag(hessian) > 0, 0.01 * np.diag(hessian).mean(), 1))
    for at in range(weights.shape[1]):
        column = weights[:, at].astype(np.float32)
        if axis == "row":
            if at % 32 == 0:
                scales = kept.scales(np.ascontiguousarray(weights[:, at : at + 32].astype(np.float32)))
            rounded = kept.nearest(column, scales)
        else:
            whole = np.zeros((-(-column.size // 32), 32), np.float32)
            whole.ravel()[: column.size] = column
            rounded = kept.nearest(column, np.repeat(kept.scales(whole), 32)[: column.size])
        inverse = np.linalg.inv(hessian[at:, at:])
        change = (weights[:, at] - rounded) / inverse[0, 0]
        weights[:, at + 1 :] -= np.outer(change, inverse[0, 1:])
        weights[:, at] = rounded
    return weights.astype(np.float32)


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("format_name", ["int8_group32", "int4_group32"])
def test_it_is_optimal_brain_quantization_in_a_fixed_order(activations, matrix, axis, format_name, monkeypatch):
    """With the format's own scales; which others are taken instead, the tests of those hold."""
    plain_scales = GroupFormat.scales
    monkeypatch.setattr(GroupFormat, "scales", lambda self, values, prices=None: plain_scales(self, values))
    found = decoded(gptq, matrix, axis, format_name, gram(activations))
    expected = plain(matrix, gram(activations), axis, format_name)
    # a value on the edge between two codes may fall to either side in float32, and what follows with it
    assert np.mean(np.abs(found - expected) > 1e-6) < 0.02


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_outputs_change_less_than_with_rounding_to_nearest(activations, matrix, axis, format_name):
    def loss(algorithm) -> float:
        changed = decoded(algorithm, matrix, axis, format_name, gram(activations)) - matrix
        return float(np.square(activations @ changed.T).sum())

    assert loss(gptq) < 0.6 * loss(rtn)


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_without_correlation_it_rounds_to_nearest(matrix, axis, format_name):
    """Nothing can be made up for: an identity couples no inputs, and what counts is the squared error of weights."""
    alone = gptq.Plugin().quantize(sliced(matrix, axis, np.eye(INPUTS, dtype=np.float32)), format_name)
    nearest = rtn.Plugin().quantize(
        replace(sliced(matrix, axis, None), importance=np.ones(INPUTS, np.float32)), format_name
    )
    # a value on the edge between two codes may fall to either side, since prices are 1 in float32 only nearly
    assert np.mean(alone == nearest) > 0.99


def test_scales_are_chosen_by_what_an_error_costs(activations, matrix, monkeypatch):
    """The price of input j is 1 / U_jj^2: against equal prices, outputs change less."""
    changed, searched = [], GroupFormat.scales
    for scales in (searched, lambda self, values, prices: searched(self, values, np.ones_like(prices))):
        monkeypatch.setattr(GroupFormat, "scales", scales)
        error = decoded(gptq, matrix, "row", "int4_group32", gram(activations)) - matrix
        changed.append(float(np.square(activations @ error.T).sum()))
    assert changed[0] < changed[1]


@pytest.mark.parametrize("axis", ["row", "column", "matrix"])
def test_inputs_that_are_not_known_are_rounded_to_nearest(matrix, axis):
    weights = sliced(matrix, axis, None)
    assert np.array_equal(
        gptq.Plugin().quantize(weights, "int4_group32"), rtn.Plugin().quantize(weights, "int4_group32")
    )


def test_blocks_change_no_byte(activations, matrix, monkeypatch):
    """In exact arithmetic; in float32 sums differ in their last bits, so all but a few codes are the same."""
    weights = sliced(matrix, "row", gram(activations))
    first = gptq.Plugin().quantize(weights, "int4_group32")
    monkeypatch.setattr(gptq, "BLOCK", 32)
    assert np.mean(gptq.Plugin().quantize(weights, "int4_group32") != first) < 0.02


def test_products_of_an_algorithm_loaded_later_are_limited_too() -> None:
    """GPTQ brings a library of its own, which was not there when rounding to nearest looked for libraries."""
    script = (
        "import threadpoolctl\n"
        "from coldpress.compiler.rounding import rtn\n"
        "from coldpress.compiler.rounding._matrix import on_one_core\n"
        "with on_one_core(rtn.Plugin()): before = len(threadpoolctl.threadpool_info())\n"
        "from coldpress.compiler.rounding import gptq\n"
        "with on_one_core(gptq.Plugin()): found = threadpoolctl.threadpool_info()\n"
        "assert len(found) > before and {library['num_threads'] for library in found} == {1}, found\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
