"""What every selector owes the decoder; a new file in runtime/sparsity is found and put through this by itself."""

import numpy as np
import pytest

from runtime import _plugins
from runtime.quantization import fp16
from schemas.families import FAMILIES

METHODS = _plugins.names("runtime.sparsity")
NUM_UNITS, HIDDEN, RANK = 96, 32, 8
DENSITIES = [1e-6, 0.05, 0.3, 0.5, 0.999, 1.0]


def fitted(method, density):
    random = np.random.default_rng(0)
    arrays = {}
    if method.NEEDS_PREDICTORS:
        arrays = {
            "fc1": fp16.encode(random.normal(size=(RANK, HIDDEN))),
            "fc2": fp16.encode(random.normal(size=(NUM_UNITS, RANK))),
            "format": np.array("fp16"),
            "threshold": np.array(0.5),
        }
    return method.fit(NUM_UNITS, density, arrays)


def signals(method):
    random = np.random.default_rng(1)
    length = HIDDEN if method.NEEDS_PREDICTORS else NUM_UNITS
    for _ in range(10):
        yield random.normal(size=length).astype(np.float32)
    yield np.maximum(random.normal(size=length), 0).astype(np.float32)
    yield np.zeros(length, np.float32)
    yield np.ones(length, np.float32)


def test_the_methods_of_this_version_are_there():
    assert {"dense", "relu", "predictor", "topk"} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_declares_what_it_drives_and_needs(name):
    method = _plugins.load("runtime.sparsity", name)
    assert method.FAMILIES
    assert set(method.FAMILIES) <= set(FAMILIES)
    assert isinstance(method.NEEDS_PREDICTORS, bool)
    assert isinstance(method.NEEDS_EXACT_ZEROS, bool)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("density", DENSITIES)
def test_a_selection_is_distinct_ascending_ids(name, density):
    method = _plugins.load("runtime.sparsity", name)
    parameters = fitted(method, density)
    for signal in signals(method):
        before = signal.copy()
        ids = method.select(signal, parameters, np.zeros(NUM_UNITS, bool))
        assert ids.dtype == np.int32
        assert ids.ndim == 1
        assert (np.diff(ids) > 0).all()
        assert ids.size == 0 or (ids[0] >= 0 and ids[-1] < NUM_UNITS)
        np.testing.assert_array_equal(signal, before)
        np.testing.assert_array_equal(ids, method.select(signal, parameters, np.zeros(NUM_UNITS, bool)))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "relu"])
def test_something_is_always_selected(name):
    method = _plugins.load("runtime.sparsity", name)
    for signal in signals(method):
        assert method.select(signal, fitted(method, 1e-6), np.zeros(NUM_UNITS, bool)).size >= 1
