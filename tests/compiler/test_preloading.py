"""Whether a build preloads: its requests and guesses, the worth of a guess, and the resulting plan."""

from dataclasses import replace

import numpy as np
import pytest

from coldpress.compiler.io import load_arrays, save_arrays
from coldpress.compiler.profiles import PROFILES
from coldpress.compiler.stages.plan import _search, preloading
from coldpress.runtime.device_profiles.devices import read_device
from coldpress.runtime.dram.budget import used_bytes
from coldpress.runtime.store.preload_room import NOTHING, Preloading
from coldpress.runtime.trace import FETCH, PRELOAD
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.order import FamilyOrder, GapCost, Order
from tests.compiler.test_plan import laid, records
from tests.support.records import tiny_activations
from tests.support.similar_layers import SimilarLayers

LAYERS = 11
FLASH_S = 2e-5
"""Of a token's misses of `mlp_in` in one layer; those of `mlp_mid` cost nothing here."""


@pytest.fixture
def given(tmp_path):
    """(what `layout` takes, activations whose guess has a precision, orders whose reads cost FLASH_S)."""
    model, sparsity, placement, device = records(tmp_path, share=0.5, num_hidden_layers=LAYERS)
    measured = tiny_activations(tmp_path, model, sparsity)

    def activations(alike):
        layers = []
        for layer in measured.layers:
            shares = {"mlp_in": alike if layer.layer else None, "mlp_mid": None}
            families = tuple(
                entry.model_copy(update={"in_layer_before": shares[entry.family]}) for entry in layer.families
            )
            layers.append(layer.model_copy(update={"families": families}))
        return measured.model_copy(update={"layers": tuple(layers)})

    arrays = save_arrays(tmp_path / "order.safetensors", {"order": np.arange(64, dtype=np.int32)[::-1].copy()})
    values = {"family": "mlp_in", "heuristic": "ripple", "arrays": arrays, "adjacent_coactivation": 0.5}
    entries = tuple(
        FamilyOrder(layer=layer, gap_costs=(GapCost(gap_bytes=0, flash_s_per_token=FLASH_S),), **values)
        for layer in range(LAYERS)
    )
    return (model, sparsity, placement, device), activations, (Order(entries=entries),)


def run_of(given, alike):
    (model, sparsity, placement, device), activations, order = given
    found, best = [], preloading.best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preloading, "best", lambda run: (found.append(run), best(run))[1])
        laid(model, sparsity, placement, device, preload="auto", order=order, activations=activations(alike))
    return found[0]


@pytest.mark.slow
def test_a_token_asks_for_what_calibration_saw_and_guesses_from_the_layer_before(given):
    """All of a guess is what the layer before uses; half of it has as many right units as consecutive layers share."""
    run = run_of(given, 0.75)
    setting, used = run.setting(NOTHING), run.used
    num_tokens = next(iter(used.values())).shape[1]
    assert num_tokens == preloading.WARM_TOKENS + preloading.MEASURED_TOKENS
    whole = preloading._token(run, setting, Preloading(4096, 1.0), num_tokens - 1, 1)
    asked = {(event.layer, event.family): event.ids for event in whole if event.kind == FETCH}
    assert asked.keys() == used.keys()
    assert all((asked[key] == np.flatnonzero(used[key][:, -1])).all() for key in asked)
    ahead = {event.layer: event.ids for event in whole if event.kind == PRELOAD}
    assert ahead.keys() == set(range(1, LAYERS))
    assert all((ahead[layer] == asked[layer - 1, "mlp_in"]).all() for layer in ahead)
    part = preloading._token(run, setting, Preloading(4096, 0.5), num_tokens - 1, 1)
    for event in (event for event in part if event.kind == PRELOAD):
        before = asked[event.layer - 1, "mlp_in"]
        right = np.isin(before, asked[event.layer, "mlp_in"])
        assert np.isin(event.ids, before).all()
        assert event.ids.size == max(1, -(-before.size // 2))
        share = preloading.guess_precision(0.75, run.sparsity.density("mlp_in", event.layer), 0.5)
        wanted = max(min(round(share * event.ids.size), right.sum()), event.ids.size - (~right).sum())
        assert np.isin(event.ids, asked[event.layer, "mlp_in"]).sum() == wanted
    assert not [event for event in preloading._token(run, setting, NOTHING, 0, 1) if event.kind == PRELOAD]


@pytest.mark.slow
def test_caches_are_full_before_a_token_counts(given):
    """By all units of each part, those that deserve DRAM most last."""
    run = run_of(given, 0.75)
    events = _search.filling(run.setting(NOTHING))
    asked = [event.ids for event in events if (event.kind, event.layer, event.family) == (FETCH, 3, "mlp_mid")]
    assert sorted(np.concatenate(asked).tolist()) == list(range(72))
    rank = load_arrays(given[0][2].arrays)["rank.3.mlp_mid"]
    assert set(asked[-1].tolist()) == set(rank[: asked[-1].size].tolist())


@pytest.mark.parametrize(("cosine", "density", "guess"), [(0.9, 0.25, 0.5), (0.6, 0.1, 1.0)])
def test_the_surest_of_a_guess_are_right_as_often_as_normal_inputs_say(cosine, density, guess):
    """Against drawn inputs."""
    random, size = np.random.default_rng(0), 400_000
    first, one = random.standard_normal((2, size))
    second = cosine * first + (1 - cosine**2) ** 0.5 * one
    last = cosine * first + (1 - cosine**2) ** 0.5 * random.standard_normal(size)
    of = {name: np.sort(np.abs(x))[-int(density * size)] for name, x in (("1", first), ("2", second), ("3", last))}
    alike = np.mean(np.abs(first)[np.abs(second) >= of["2"]] >= of["1"])
    sure = np.argsort(-np.abs(first))[: int(guess * density * size)]
    right = np.mean(np.abs(last[sure]) >= of["3"])
    assert preloading.guess_precision(float(alike), density, guess) == pytest.approx(right, abs=0.01)


@pytest.mark.slow
def test_nothing_is_known_of_a_guess_that_nobody_measured(given):
    run = run_of(given, 0.75)
    assert preloading._shared(run, run.sections[2]) == 0.75
    assert preloading._shared(run, run.sections[0]) == 0  # nothing comes before it
    assert preloading._shared(run, run.sections[3]) == 0  # mlp_mid: no product of the layer before
    unknown = replace(run, known=replace(run.known, activations=None))
    assert preloading.best(unknown) == (NOTHING, 1.0)
    assert preloading.guess_precision(0.0, 0.25, 1.0) == 0
    assert preloading.guess_precision(0.2, 0.25, 1.0) == 0.25  # no worse than by chance
    assert preloading.guess_precision(0.5, 1.0, 1.0) == preloading.guess_precision(1.0, 0.25, 0.5) == 1


MAP = [
    ("iphone-a18", "relu", 0.1, 0.95, 0.9, True),
    ("pixel6", "silu", 0.5, 0.95, 0.9, True),
    ("macbook-m1-max", "silu", 0.5, 0.95, 0.5, False),
    ("macbook-m1-max", "relu", 0.1, 0.2, 0.5, False),
]
"""Device, activation, density, likeness of layers, share in DRAM, and whether preloading pays (flash-08)."""


@pytest.mark.slow
@pytest.mark.parametrize(("device", "act", "density", "similarity", "share", "pays"), MAP)
def test_auto_preloads_where_a_simulated_token_takes_less_time(device, act, density, similarity, share, pays):
    """The law's word is that of the runtime's own store on modelled flash, and what it switches on does not lose."""
    profile = read_device(PROFILES / "devices" / f"{device}.yaml")
    shape = SimilarLayers(profile, act, density, similarity, share, num_layers=4)
    found, best = [], preloading.best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preloading, "best", lambda run: found.append(best(run)) or found[-1])
        off, on, auto = (shape.layout(preload, [shape.order]).plans[0] for preload in ("off", "on", "auto"))
    artifact = shape.artifact(shape.layout(order=[shape.order]))
    plain, ahead = (shape.decoded(artifact, plan, 3) for plan in (off, on))
    assert used_bytes(artifact.manifest, on) <= on.dram_budget_bytes == off.dram_budget_bytes
    assert auto == (on if pays else off)
    assert (ahead.token_s < 0.99 * plain.token_s) == pays
    for _, share_of_time in found:  # what the law says, for `on` and for `auto`
        assert share_of_time == pytest.approx(ahead.token_s / plain.token_s, abs=0.01)
    assert len(found) == 2


def test_on_takes_its_buffer_from_the_caches(given):
    (model, sparsity, placement, device), _, _ = given
    without, ahead = (laid(model, sparsity, placement, device, preload=word).plans[0] for word in ("off", "on"))
    assert (
        0
        < ahead.preload_buffer_bytes
        <= 0.25 * sum(part.cache_slots * {"mlp_in": 204, "mlp_mid": 68}[part.family] for part in without.parts) + 4096
    )
    assert sum(part.cache_slots for part in ahead.parts) < sum(part.cache_slots for part in without.parts)
    assert [part.num_pinned for part in ahead.parts] == [part.num_pinned for part in without.parts]


def test_on_is_refused_where_nothing_can_be_preloaded(tmp_path):
    with pytest.raises(ColdpressError, match=r"preload=on was asked for, and up_down in 2 sections.*expected neuron"):
        laid(*records(tmp_path, "relu"), preload="on")
