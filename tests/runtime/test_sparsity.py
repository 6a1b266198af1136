"""Each selector against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from runtime import _plugins
from runtime.sparsity import dense, predictor, relu, topk
from schemas.errors import ColdpressError
from tests.support.artifacts import small_spec
from tests.support.methods import fit, nothing_cached

NONE = nothing_cached(0)


def test_dense_takes_all():
    np.testing.assert_array_equal(dense.select(np.zeros(3, np.float32), {}, nothing_cached(5)), np.arange(5))


def test_relu_takes_what_is_not_zero():
    signal = np.array([0, 2, -0.0, -3, 1e-38, 0], np.float32)
    assert relu.select(signal, {}, NONE).tolist() == [1, 3, 4]


def test_relu_may_take_nothing():
    assert relu.select(np.zeros(4, np.float32), {}, NONE).size == 0


@pytest.mark.parametrize(
    ("num_units", "density", "expected"),
    [(100, 0.25, 25), (100, 0.001, 1), (100, 0.0, 1), (100, 1.0, 100), (10, 0.26, 3), (10, 0.25, 2), (172, 0.5, 86)],
)
def test_topk_counts(num_units, density, expected):
    assert fit("topk", num_units, density)["num_selected"].tolist() == [expected]


def test_topk_takes_the_largest_magnitudes():
    signal = np.array([0.1, -5, 3, 0, -4, 2], np.float32)
    assert topk.select(signal, {"num_selected": [3]}, NONE).tolist() == [1, 2, 4]


def test_topk_gives_ties_to_the_lower_ids():
    signal = np.array([1, -2, 2, 1, -1, 2, 1], np.float32)
    assert topk.select(signal, {"num_selected": [5]}, NONE).tolist() == [0, 1, 2, 3, 5]
    assert topk.select(np.zeros(5, np.float32), {"num_selected": [2]}, NONE).tolist() == [0, 1]


@given(signal=arrays(np.float32, st.integers(1, 60), elements=st.sampled_from([0, 1, -1, 2, 0.5, -3])), data=st.data())
def test_topk_is_a_stable_sort(signal, data):
    k = data.draw(st.integers(1, signal.size))
    expected = np.sort(np.argsort(-np.abs(signal), kind="stable")[:k])
    np.testing.assert_array_equal(topk.select(signal, {"num_selected": [k]}, NONE), expected)


@pytest.fixture(params=_plugins.names("runtime.quantization"))
def network(request):
    """Codes of fc1 [16, 40] and fc2 [200, 16]: in groups of 32 neither fills its last one."""
    random, plugin = np.random.default_rng(3), _plugins.load("runtime.quantization", request.param)
    return {
        "fc1": plugin.encode(random.normal(size=(16, 40))),
        "fc2": plugin.encode(random.normal(size=(200, 16))),
        "format": np.array(request.param),
    }


def scores_of(network, x):
    plugin = _plugins.load("runtime.quantization", str(network["format"]))
    fc1, fc2 = plugin.decode(network["fc1"], 40), plugin.decode(network["fc2"], 16)
    return fc2.astype(np.float64) @ np.maximum(fc1.astype(np.float64) @ x.astype(np.float64), 0)


def test_predictor_takes_the_scores_from_the_threshold_on(network):
    x = np.random.default_rng(4).normal(size=40).astype(np.float32)
    scores = scores_of(network, x)
    threshold = float(np.sort(scores)[-30:-28].mean())  # between two scores, so that rounding cannot matter
    found = predictor.select(x, network | {"threshold": np.array(threshold)}, NONE)
    np.testing.assert_array_equal(found, np.flatnonzero(scores >= threshold))
    assert found.size == 29


def test_predictor_takes_the_best_where_none_reaches_the_threshold(network):
    x = np.random.default_rng(5).normal(size=40).astype(np.float32)
    found = predictor.select(x, network | {"threshold": np.array(1e6)}, NONE)
    assert found.tolist() == [int(np.argmax(scores_of(network, x)))]


def test_predictor_takes_all_where_there_is_nothing_to_predict():
    found = predictor.select(np.zeros(40, np.float32), {}, nothing_cached(200))
    assert found.tolist() == list(range(200))


def test_predictor_aims_at_what_is_not_zero_or_the_largest():
    activity = np.array([[0, 3, -1, 0], [-2, 0, 0, 0]], np.float32)
    counted = predictor.fit(4, 0.5, {"counts": np.zeros(4)}, predictor.Options())
    np.testing.assert_array_equal(predictor.select_many(activity, counted), activity != 0)
    np.testing.assert_array_equal(
        predictor.select_many(activity, fit("predictor", 4, 0.5)), [[0, 1, 1, 0], [1, 1, 0, 0]]
    )


def test_dense_keeps_on_flash_what_its_options_name():
    spec = small_spec()
    assert dense.families(spec, dense.Options(families="gate_down+attn_in")) == ("gate_down", "attn_in")
    with pytest.raises(ColdpressError, match="families=neuron_: unknown 'neuron_', known are neuron, up_down"):
        dense.families(spec, dense.Options(families="neuron_"))
    with pytest.raises(ColdpressError, match="up_proj is in two of them"):
        dense.families(spec, dense.Options(families="up_down+mlp_in"))


def test_topk_prunes_attention_where_that_is_asked_for():
    assert topk.families(small_spec(), topk.Options()) == ("mlp_in", "mlp_mid")
    found = topk.families(small_spec(), topk.Options(attention=True))
    assert found == ("attn_in", "attn_out", "mlp_in", "mlp_mid")
