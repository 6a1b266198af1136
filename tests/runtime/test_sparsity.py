"""Each selector against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coldpress.runtime import plugins
from coldpress.runtime.arithmetic import largest
from coldpress.runtime.kernels import products
from coldpress.runtime.quantization import Format
from coldpress.runtime.sparsity import (
    Residency,
    Selector,
    dense,
    dip,
    dip_ca,
    flash,
    glu,
    predictor,
    relu,
    threshold,
    topk,
    wina,
)
from coldpress.runtime.sparsity._magnitudes import threshold as level_of
from coldpress.schemas.errors import ColdpressError
from tests.support.artifacts import small_spec
from tests.support.kernels import formats_of
from tests.support.methods import counted, fit, nothing_cached

NONE = nothing_cached(0)


def test_dense_takes_all():
    np.testing.assert_array_equal(dense.Plugin().select(np.zeros(3, np.float32), {}, nothing_cached(5)), np.arange(5))


def test_relu_takes_what_is_not_zero():
    signal = np.array([0, 2, -0.0, -3, 1e-38, 0], np.float32)
    assert relu.Plugin().select(signal, {}, NONE).tolist() == [1, 3, 4]


def test_relu_may_take_nothing():
    assert relu.Plugin().select(np.zeros(4, np.float32), {}, NONE).size == 0


@pytest.mark.parametrize(
    ("num_units", "density", "expected"),
    [(100, 0.25, 25), (100, 0.001, 1), (100, 0.0, 1), (100, 1.0, 100), (10, 0.26, 3), (10, 0.25, 2), (172, 0.5, 86)],
)
def test_topk_counts(num_units, density, expected):
    assert fit("topk", num_units, density)["num_selected"].tolist() == [expected]


def test_topk_takes_the_largest_magnitudes():
    signal = np.array([0.1, -5, 3, 0, -4, 2], np.float32)
    assert topk.Plugin().select(signal, {"num_selected": [3]}, NONE).tolist() == [1, 2, 4]


@given(arrays(np.float32, (5, 9), elements=st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0])), st.integers(1, 9))
def test_largest_is_a_stable_sort_whatever_the_zeros(values, k):
    chosen = largest(values, k)
    for row, found in zip(values, chosen, strict=True):
        assert np.flatnonzero(found).tolist() == sorted(np.argsort(-row, kind="stable")[:k].tolist())


@given(arrays(np.float32, (3, 7), elements=st.sampled_from([-2.0, -1.0, 0.0, 1.0])), st.integers(1, 7))
def test_largest_takes_negative_values_last(values, k):
    chosen = largest(values, k)
    for row, found in zip(values, chosen, strict=True):
        assert np.flatnonzero(found).tolist() == sorted(np.argsort(-row, kind="stable")[:k].tolist())


def test_topk_gives_ties_to_the_lower_ids():
    signal = np.array([1, -2, 2, 1, -1, 2, 1], np.float32)
    assert topk.Plugin().select(signal, {"num_selected": [5]}, NONE).tolist() == [0, 1, 2, 3, 5]
    assert topk.Plugin().select(np.zeros(5, np.float32), {"num_selected": [2]}, NONE).tolist() == [0, 1]


@given(signal=arrays(np.float32, st.integers(1, 60), elements=st.sampled_from([0, 1, -1, 2, 0.5, -3])), data=st.data())
def test_topk_is_a_stable_sort(signal, data):
    k = data.draw(st.integers(1, signal.size))
    expected = np.sort(np.argsort(-np.abs(signal), kind="stable")[:k])
    np.testing.assert_array_equal(topk.Plugin().select(signal, {"num_selected": [k]}, NONE), expected)


@pytest.fixture(params=formats_of(40))
def network(request):
    """Codes of fc1 [16, 40] and fc2 [200, 16]: in groups of 32 neither fills its last one."""
    random, plugin = np.random.default_rng(3), plugins.load("coldpress.runtime.quantization", Format, request.param)
    return {
        "fc1": plugin.encode(random.normal(size=(16, 40))),
        "fc2": plugin.encode(random.normal(size=(200, 16))),
        "format": np.array(request.param),
        "num_selected": np.array([0], np.int32),
    }


def scores_of(network, x):
    plugin = plugins.load("coldpress.runtime.quantization", Format, str(network["format"]))
    fc1, fc2 = plugin.decode(network["fc1"], 40), plugin.decode(network["fc2"], 16)
    return fc2.astype(np.float64) @ np.maximum(fc1.astype(np.float64) @ x.astype(np.float64), 0)


def test_predictor_takes_the_scores_from_the_threshold_on(network):
    x = np.random.default_rng(4).normal(size=40).astype(np.float32)
    scores = scores_of(network, x)
    threshold = float(np.sort(scores)[-30:-28].mean())  # between two scores, so that rounding cannot matter
    found = predictor.Plugin().select(x, network | {"threshold": np.array(threshold)}, NONE)
    np.testing.assert_array_equal(found, np.flatnonzero(scores >= threshold))
    assert found.size == 29


def test_a_score_that_is_the_threshold_reaches_it(network):
    """As `predict` means it, whose threshold is the least score that must be found; scores are the kernels' own."""
    x = np.random.default_rng(4).normal(size=40).astype(np.float32)
    name = str(network["format"])
    inner = np.maximum(products.gemv(network["fc1"], 40, name, x), 0, dtype=np.float32)
    scores = np.sort(products.gemv(network["fc2"], 16, name, inner))
    assert scores[-31] < scores[-30] < scores[-29]
    assert predictor.Plugin().select(x, network | {"threshold": np.array(float(scores[-30]))}, NONE).size == 30


def test_predictor_takes_the_best_where_none_reaches_the_threshold(network):
    x = np.random.default_rng(5).normal(size=40).astype(np.float32)
    found = predictor.Plugin().select(x, network | {"threshold": np.array(1e6)}, NONE)
    assert found.tolist() == [int(np.argmax(scores_of(network, x)))]


def test_predictor_takes_the_same_number_for_every_token_where_that_is_asked_for(network):
    """DejaVu's form: the largest scores, negative ones too, whatever the threshold says."""
    for seed in (4, 5):
        x = np.random.default_rng(seed).normal(size=40).astype(np.float32)
        arrays = network | {"threshold": np.array(1e6), "num_selected": np.array([150], np.int32)}
        found = predictor.Plugin().select(x, arrays, NONE)
        np.testing.assert_array_equal(found, np.sort(np.argsort(-scores_of(network, x))[:150]))
    for ratio, expected in ((0, 0), (1.5, 60), (3, 100)):
        options = predictor.Options(topk_ratio=ratio)
        assert predictor.Plugin().fit(100, 0.4, {"counts": np.zeros(4)}, options)["num_selected"].tolist() == [expected]


def test_predictor_goes_by_the_threshold_where_a_file_says_less_than_no_units(network):
    """As a damaged or hostile one may."""
    x = np.random.default_rng(4).normal(size=40).astype(np.float32)
    arrays = network | {"threshold": np.array(0.5), "num_selected": np.array([-600], np.int32)}
    np.testing.assert_array_equal(
        predictor.Plugin().select(x, arrays, NONE),
        predictor.Plugin().select(x, network | {"threshold": np.array(0.5)}, NONE),
    )


def test_predictor_takes_all_where_there_is_nothing_to_predict():
    found = predictor.Plugin().select(np.zeros(40, np.float32), {}, nothing_cached(200))
    assert found.tolist() == list(range(200))


def test_predictor_aims_at_what_is_not_zero_or_the_largest():
    activity = np.array([[0, 3, -1, 0], [-2, 0, 0, 0]], np.float32)
    counted = predictor.Plugin().fit(4, 0.5, {"counts": np.zeros(4)}, predictor.Options())
    np.testing.assert_array_equal(predictor.Plugin().select_many(activity, counted), activity != 0)
    np.testing.assert_array_equal(
        predictor.Plugin().select_many(activity, fit("predictor", 4, 0.5)), [[0, 1, 1, 0], [1, 1, 0, 0]]
    )


def test_dense_keeps_on_flash_what_its_options_name():
    spec = small_spec()
    assert dense.Plugin().families(spec, dense.Options(families="gate_down+attn_in")) == ("gate_down", "attn_in")
    assert dense.Plugin().families(spec, dense.Options()) == ("block",)
    narrow = small_spec(intermediate_size=100)
    assert dense.Plugin().families(narrow, dense.Options()) == ("neuron",)
    mixture = {"num_experts": 4, "num_experts_per_tok": 2}
    found = {
        size: dense.Plugin().families(small_spec(intermediate_size=size, **mixture), dense.Options())
        for size in (96, 100)
    }
    assert found == {96: ("block",), 100: ("neuron",)}
    with pytest.raises(ColdpressError, match=r"families=block: a block has 256 or 32 neurons, and this MLP has 100"):
        dense.Plugin().families(narrow, dense.Options(families="block"))
    with pytest.raises(ColdpressError, match="families=neuron_: unknown 'neuron_', known are neuron, block"):
        dense.Plugin().families(spec, dense.Options(families="neuron_"))
    with pytest.raises(ColdpressError, match="up_proj is in two of them"):
        dense.Plugin().families(spec, dense.Options(families="up_down+mlp_in"))


def histogram(magnitudes, edges):
    counts = np.histogram(magnitudes, edges)[0].astype(np.uint64)
    return {"magnitude_histogram": counts, "magnitude_edges": np.asarray(edges, np.float32)}


@pytest.mark.parametrize("density", [0.01, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_a_threshold_is_a_quantile(density):
    magnitudes = np.abs(np.random.default_rng(6).standard_t(3, 200_000))
    edges = np.append(np.linspace(0, 20, 5001), 1e4)
    level = level_of(histogram(magnitudes, edges), density)
    assert np.mean(magnitudes >= level) == pytest.approx(density, abs=2e-4)


def test_a_threshold_leaves_out_zeros_whatever_the_density():
    magnitudes = np.concatenate([np.zeros(70), np.linspace(1, 2, 30)])
    statistics = histogram(magnitudes, [0, 0.5, 1, 1.5, 2.5])
    for density in (0.3, 0.31, 0.7, 1.0):
        assert 0 < level_of(statistics, density) <= 1
    arrays = threshold.Plugin().fit(4, 1.0, statistics, topk.Options())
    assert threshold.Plugin().select(np.array([0, 1e-45, -2, 0], np.float32), arrays, NONE).tolist() == [1, 2]


def test_a_threshold_in_the_last_bin_is_its_beginning():
    assert level_of(histogram(np.full(10, 3.0), [0, 1, 2, 3.4e38]), 0.1) == 2


def test_threshold_takes_the_largest_where_none_reaches_it():
    arrays = {"threshold": np.array([5], np.float32)}
    assert threshold.Plugin().select(np.array([1, -3, 2], np.float32), arrays, NONE).tolist() == [1]
    assert threshold.Plugin().select(np.array([1, -5, 6], np.float32), arrays, NONE).tolist() == [1, 2]


@pytest.mark.parametrize(("name", "missing"), [("threshold", "magnitudes"), ("wina", "norms")])
def test_what_calibration_alone_knows_is_asked_for_in_a_sentence(name, missing):
    method = plugins.load("coldpress.runtime.sparsity", Selector, name)
    with pytest.raises(ColdpressError, match=f"needs the {missing} .* build with"):
        method.fit(4, 0.5, {}, method.OPTIONS())


@pytest.mark.parametrize("name", ["gate", "up", "glu"])
def test_an_oracle_is_no_artifact(name):
    method = plugins.load("coldpress.runtime.sparsity", Selector, name)
    with pytest.raises(ColdpressError, match=f"method {name} with oracle=true decides by .* build with oracle=false"):
        method.families(small_spec(), method.OPTIONS(oracle=True))
    assert glu.Plugin().families(small_spec(), glu.Plugin.OPTIONS()) == ("mlp_mid",)


def test_wina_weighs_inputs_by_what_they_multiply():
    arrays = {"num_selected": [2], "unit_norms": np.array([1, 10, 0.1, 2], np.float32)}
    signal = np.array([-3, 0.5, 9, 2], np.float32)  # 3, 5, 0.9, 4
    assert wina.Plugin().select(signal, arrays, NONE).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("gamma", "expected"), [(1.0, [0, 1, 4]), (0.5, [0, 1, 3]), (0.2, [0, 2, 3]), (0.0, [0, 2, 3])]
)
def test_dip_ca_prefers_what_is_in_dram(gamma, expected):
    """Eq. 10 by hand: magnitudes 9, 5, 2, 3, 4, of which units 2 and 3 are in DRAM."""
    signal = np.array([9, -5, 2, -3, 4], np.float32)
    residency = Residency(np.array([0, 0, 1, 1, 0], bool), np.arange(5, dtype=np.int32))
    arrays = {"num_selected": [3], "gamma": np.array([gamma], np.float32)}
    assert dip_ca.Plugin().select(signal, arrays, residency).tolist() == expected


@given(signal=arrays(np.float32, 24, elements=st.floats(-4, 4, width=32)), data=st.data())
def test_dip_ca_is_algorithm_1(signal, data):
    present = data.draw(arrays(bool, 24))
    gamma = data.draw(st.sampled_from([0.1, 0.2, 0.5, 1.0]))
    k = data.draw(st.integers(1, 24))
    scores = np.abs(signal).astype(np.float64) * (present + np.float64(np.float32(gamma)) * ~present)
    expected = np.sort(np.argsort(-scores, kind="stable")[:k])
    kept = {"num_selected": [k], "gamma": np.array([gamma], np.float32)}
    found = dip_ca.Plugin().select(signal, kept, Residency(present, np.arange(24, dtype=np.int32)))
    np.testing.assert_array_equal(found, expected)


def test_dip_divides_by_what_its_options_say():
    spec = small_spec()
    assert dip.Plugin().divide(0.5, spec, dip.Options(input_density=0.6)) == pytest.approx(
        {"mlp_in": 0.6, "mlp_mid": 0.3}
    )
    assert dip.Plugin().divide(0.5, spec, dip.Options(glu_density=0.3)) == pytest.approx(
        {"mlp_in": 0.6, "mlp_mid": 0.3}
    )
    both = dip.Options(input_density=0.9, glu_density=0.1)
    assert dip.Plugin().divide(0.5, spec, both) == {"mlp_in": 0.9, "mlp_mid": 0.1}
    with pytest.raises(ColdpressError, match=r"an MLP of density 0\.3 with input_density=0\.9 and .* would"):
        dip.Plugin().divide(0.3, spec, dip.Options(input_density=0.9))


def test_topk_prunes_attention_where_that_is_asked_for():
    assert topk.Plugin().families(small_spec(), topk.Options()) == ("mlp_in", "mlp_mid")
    found = topk.Plugin().families(small_spec(), topk.Options(attention=True))
    assert found == ("attn_in", "attn_out", "mlp_in", "mlp_mid")


def flash_arrays(num_units, price, own, edge=0.0):
    arrays = {"price": np.array([price]), "read_units": np.array([own, edge, 0, 1]), "unit_norms": np.ones(num_units)}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def test_flash_reads_together_what_lies_together():
    """A read takes as long as three units: 4 and 5 lie beside 1 on flash, 7 alone, at its other end."""
    signal = np.array([0.1, 3, 0.1, 0.1, 0.5, 0.5, 0.1, 1.2, 0.1, 0.1], np.float32)
    position = np.array([5, 0, 6, 7, 1, 2, 8, 9, 4, 3], np.int32)
    somewhere = Residency(np.zeros(10, bool), position)
    assert flash.Plugin().select(signal, flash_arrays(10, 1.0, 3.0), somewhere).tolist() == [1, 4, 5]
    assert flash.Plugin().select(signal, flash_arrays(10, 0.1, 3.0), somewhere).tolist() == [1, 4, 5, 7]
    assert flash.Plugin().select(signal, flash_arrays(10, 1e3, 3.0), somewhere).tolist() == [
        1
    ]  # the largest, where none pays


def test_flash_does_not_pay_for_what_is_in_dram():
    """In DRAM the large unit names itself, but no read comes by any more."""
    signal = np.array([3, 0.5, 0.5, 0, 0, 0, 0, 0], np.float32)
    present = np.arange(8) == 0
    arrays = flash_arrays(8, 0.5, 3.0)
    assert flash.Plugin().select(signal, arrays, nothing_cached(8)).tolist() == [0, 1, 2]
    assert flash.Plugin().select(signal, arrays, Residency(present, np.arange(8, dtype=np.int32))).tolist() == [0]
    small = np.where(present, np.float32(0.1), signal)  # not worth its bytes: the cache need not keep it
    assert 0 not in flash.Plugin().select(small, arrays, Residency(present, np.arange(8, dtype=np.int32))).tolist()


def test_flash_reads_more_where_the_first_byte_takes_longer():
    """In the time that passes until it comes, four reads are made: two of them matter little."""
    signal = np.array([3, 0, 0, 0.5, 0, 0, 3, 0, 0, 0.6], np.float32)
    arrays = flash_arrays(10, 1.0, 1.5)
    assert flash.Plugin().select(signal, arrays, nothing_cached(10)).tolist() == [0, 6]
    arrays["read_units"][2] = 6
    assert flash.Plugin().select(signal, arrays, nothing_cached(10)).tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("density", [0.2, 0.5, 0.8])
def test_flash_uses_the_density_that_it_is_fitted_to(density):
    """On signals spread like those that calibration counted, here made apart from the fit's own."""
    arrays = fit("flash", 4000, density)
    signal = np.random.default_rng(11).normal(size=(20, 4000)).astype(np.float32)
    assert flash.Plugin().select_many(signal, arrays).mean() == pytest.approx(density, abs=0.03)


@pytest.mark.parametrize("density", [0.3, 0.5])
def test_flash_names_the_density_that_it_is_fitted_to_with_units_in_dram(density):
    """Any 0.6 of them; a price that was fitted as if there were none names far less."""
    random = np.random.default_rng(12)
    signals, present = random.normal(size=(20, 4000)).astype(np.float32), random.random((20, 4000)) < 0.6
    place = random.permutation(4000).astype(np.int32)
    known = counted(4000)
    named = {
        share: np.mean(
            [flash.Plugin().select(x, arrays, Residency(p, place)).size for x, p in zip(signals, present, strict=True)]
        )
        for share in (0.0, 0.6)
        for arrays in [
            flash.Plugin().fit(4000, density, known | {"resident_share": np.array([share])}, flash.Options())
        ]
    }
    assert named[0.6] / 4000 == pytest.approx(density, abs=0.03)
    assert named[0.0] / 4000 < density - 0.06


def test_flash_needs_what_a_read_costs():
    known = counted(40)
    for name in ("unit_norms", "read_units"):
        with pytest.raises(ColdpressError, match=r"flash needs the norms of .* and what a read costs"):
            flash.Plugin().fit(40, 0.5, {key: array for key, array in known.items() if key != name}, flash.Options())
