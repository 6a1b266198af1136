"""What every selector owes the decoder; a new file in runtime/sparsity is found and put through this by itself."""

from typing import get_args

import numpy as np
import pytest

from coldpress.runtime import plugins
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.quantization import fp16
from coldpress.runtime.sparsity import DensitySource, Residency, Selector
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FAMILIES, num_units, slice_shape, slices
from tests.support.artifacts import small_spec
from tests.support.methods import fit, nothing_cached

METHODS = plugins.names("coldpress.runtime.sparsity")
NUM_UNITS, HIDDEN, RANK = 96, 32, 8
DENSITIES = [1e-6, 0.05, 0.3, 0.5, 0.999, 1.0]


def fitted(name, density):
    random = np.random.default_rng(0)
    arrays = fit(name, NUM_UNITS, density)
    if plugins.load("coldpress.runtime.sparsity", Selector, name).NEEDS_PREDICTORS:
        arrays |= {
            "fc1": fp16.Plugin().encode(random.normal(size=(RANK, HIDDEN))),
            "fc2": fp16.Plugin().encode(random.normal(size=(NUM_UNITS, RANK))),
            "format": np.array("fp16"),
            "threshold": np.array(0.1),
        }
    return arrays


def signals(method):
    random = np.random.default_rng(1)
    length = HIDDEN if method.NEEDS_PREDICTORS else NUM_UNITS
    for _ in range(10):
        yield random.normal(size=length).astype(np.float32)
    yield np.maximum(random.normal(size=length), 0).astype(np.float32)
    yield np.round(random.normal(size=length), 1).astype(np.float32)
    yield np.zeros(length, np.float32)
    yield np.ones(length, np.float32)


def residency(share):
    random = np.random.default_rng(2)
    return Residency(random.random(NUM_UNITS) < share, random.permutation(NUM_UNITS).astype(np.int32))


def test_the_methods_of_this_version_are_there():
    dip = {"dip", "dip_ca", "gate", "up", "glu", "cats"}
    assert {"dense", "relu", "fatrelu", "predictor", "topk", "threshold", "wina", "flash", *dip} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_declares_what_it_drives_and_needs(name):
    method = plugins.load("coldpress.runtime.sparsity", Selector, name)
    assert method.CHOOSES
    assert set(method.CHOOSES) <= set(FAMILIES)
    for spec in (small_spec(), small_spec(gated_mlp=False)):
        families = method.families(spec, method.OPTIONS())
        assert families
        assert set(families) <= set(method.CHOOSES)
        roles = [piece.role for family in families for piece in slices(family, spec)]
        assert len(set(roles)) == len(roles)
    for flag in (method.NEEDS_PREDICTORS, method.NEEDS_EXACT_ZEROS, method.EXACT, method.SEES_RESIDENCY):
        assert isinstance(flag, bool)
    assert 0 <= method.MISSED_SHARE < 1
    arrays = fit(name, NUM_UNITS, 0.5)
    for key, kept in method.KEPT.items():
        assert (arrays[key].dtype.name, arrays[key].shape) == (kept.dtype, kept.shape(NUM_UNITS))
    assert {method.densities(exact) for exact in (True, False)} <= set(get_args(DensitySource))
    assert all(field.description and not field.is_required() for field in method.OPTIONS.model_fields.values())


def mlp_bytes(spec, families):
    """Bytes in fp16 of a layer's MLP: by family all its units' and one unit's, and those of the matrices in DRAM."""
    sizes = {"gate_proj": 1, "up_proj": 1, "down_proj": 1} if spec.gated_mlp else {"up_proj": 1, "down_proj": 1}
    whole = dict.fromkeys(sizes, 2 * spec.hidden_size * spec.intermediate_size * spec.num_experts)
    units = {}
    for family in families:
        pieces = [piece for piece in slices(family, spec) if piece.role in whole]
        units[family] = (num_units(family, spec), 2 * sum(slice_shape(piece, spec)[1] for piece in pieces))
        for piece in pieces:
            whole.pop(piece.role)
    return units, sum(whole.values())


def of_attention(method):
    """The method's options, by themselves and with attention's matrices where it can leave those out."""
    yield method.OPTIONS()
    if "attention" in method.OPTIONS.model_fields:
        yield method.OPTIONS(attention=True)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("density", [0.05, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_a_density_is_the_share_of_the_mlp_s_bytes_whatever_the_method(name, gated, experts, density):
    """To half a unit of each family; a method that needs more of the MLP on every token says so."""
    method = plugins.load("coldpress.runtime.sparsity", Selector, name)
    picked = max(1, experts // 2)
    spec = small_spec(gated_mlp=gated, num_experts=experts, num_experts_per_tok=picked)
    for options in of_attention(method):
        families = method.families(spec, options)
        units, resident = mlp_bytes(spec, families)
        total = resident + sum(count * size for count, size in units.values())
        if density < 1 and density <= resident / total + 1e-9:
            with pytest.raises(ColdpressError, match=rf"method {name} uses {resident / total:.3g} of the MLP's"):
                method.divide(density, spec, options)
            continue
        shares = method.divide(density, spec, options)
        assert tuple(shares) == families
        assert all(0 < share <= 1 for share in shares.values())
        used = {family: round(share * units[family][0] * picked / experts) for family, share in shares.items()}
        active = resident * picked / experts + sum(used[family] * units[family][1] for family in families)
        rounding = sum(size / 2 for _, size in units.values())
        assert abs(active - density * total * picked / experts) <= rounding + 1e-6
        assert all(shares[family] == density for family in families if not units[family][1])


@pytest.mark.parametrize("name", METHODS)
def test_a_choice_hangs_on_residency_where_the_method_says_so(name):
    method = plugins.load("coldpress.runtime.sparsity", Selector, name)
    arrays = fitted(name, 0.5)
    some = [method.select(signal, arrays, residency(0.4)).tolist() for signal in signals(method)]
    none = [method.select(signal, arrays, residency(0.0)).tolist() for signal in signals(method)]
    assert (some != none) == method.SEES_RESIDENCY


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("cached", [0.0, 0.4])
def test_a_selection_is_distinct_ascending_ids(name, density, cached):
    method = plugins.load("coldpress.runtime.sparsity", Selector, name)
    arrays = fitted(name, density)
    for signal in signals(method):
        before = signal.copy()
        ids = method.select(signal, arrays, residency(cached))
        assert ids.dtype == np.int32
        assert ids.ndim == 1
        assert (np.diff(ids) > 0).all()
        assert ids.size == 0 or (ids[0] >= 0 and ids[-1] < NUM_UNITS)
        np.testing.assert_array_equal(signal, before)
        np.testing.assert_array_equal(ids, method.select(signal, arrays, residency(cached)))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("density", DENSITIES)
def test_many_tokens_at_once_are_decided_as_one_by_one(name, density):
    """A predictor's aim is a decision of its own: its signal has no entry per unit."""
    method = plugins.load("coldpress.runtime.sparsity", Selector, name)
    arrays = fitted(name, density)
    random = np.random.default_rng(3)
    activity = np.round(random.normal(size=(20, NUM_UNITS)), 1).astype(np.float32)
    activity[3] = 0
    mask = method.select_many(activity, arrays)
    assert mask.shape == activity.shape
    assert mask.dtype == bool
    for row, chosen in zip(activity, mask, strict=True):
        alone = method.select_many(row[None], arrays)[0]
        np.testing.assert_array_equal(chosen, alone)
        if not method.NEEDS_PREDICTORS:
            np.testing.assert_array_equal(np.flatnonzero(chosen), method.select(row, arrays, nothing_cached(NUM_UNITS)))


@pytest.mark.parametrize("name", METHODS)
def test_what_is_left_out_is_nothing_where_the_method_says_so(name):
    method = plugins.load("coldpress.runtime.sparsity", Selector, name)
    activity = np.maximum(np.random.default_rng(4).normal(size=(5, NUM_UNITS)), 0).astype(np.float32)
    left = np.where(method.select_many(activity, fitted(name, 0.25)), 0, activity)
    assert (np.abs(left).sum() == 0) == method.EXACT


@pytest.mark.parametrize("name", METHODS)
def test_something_is_selected_unless_nothing_counts(name):
    method, arrays = plugins.load("coldpress.runtime.sparsity", Selector, name), fitted(name, 1e-6)
    for signal in signals(method):
        found = method.select(signal, arrays, residency(0.0)).size
        assert found >= 1 or (method.NEEDS_EXACT_ZEROS and not signal.any())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", METHODS)
def test_a_huge_signal_uses_what_a_small_one_does(name):
    """At least; its square is no float32."""
    method, arrays = plugins.load("coldpress.runtime.sparsity", Selector, name), fitted(name, 0.5)
    for signal in signals(method):
        small, huge = (method.select(each, arrays, residency(0.4)) for each in (signal, signal * np.float32(1e20)))
        assert method.NEEDS_PREDICTORS or set(small.tolist()) <= set(huge.tolist())


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("name", METHODS)
def test_each_token_of_a_pass_has_the_units_that_it_has_alone(name, density):
    selection, key = object.__new__(Selection), (0, "mlp_mid")
    selection.method, selection.arrays = (
        plugins.load("coldpress.runtime.sparsity", Selector, name),
        {key: fitted(name, density)},
    )
    many, where = np.stack(list(signals(selection.method))), residency(0.5)
    for signal, ids in zip(many, selection.select(key, many, where), strict=True):
        (alone,) = selection.select(key, signal[None], where)
        assert ids.dtype == alone.dtype == np.int32
        np.testing.assert_array_equal(ids, alone)
