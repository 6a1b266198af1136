"""Predictors of a mixture of experts: of a token's own experts alone, held against scores in plain numpy."""

from dataclasses import replace

import numpy as np
import pytest

from coldpress.runtime import plugins
from coldpress.runtime.artifact.contents import layout_bytes, predictor_tensors
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels import products
from coldpress.runtime.quantization import Format
from coldpress.runtime.store.resident import computed_bytes
from coldpress.runtime.trace import FETCH, PRELOAD, Recorder
from coldpress.schemas.errors import ArtifactError
from coldpress.schemas.manifest import PREDICTORS_FILE
from tests.support.artifacts import Recipe, build_artifact, change_arrays, change_manifest, small_spec

EXPERTS, CHOSEN, WIDTH, LAYERS, RANK = 6, 2, 96, 3, 8
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]
THRESHOLD = 0.1
PLAIN = 1
"""The layer without a predictor, where one has none."""


def recipe_of(act, **changes):
    shape = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "intermediate_size": WIDTH}
    spec = small_spec(num_hidden_layers=LAYERS, hidden_act=act, **shape)
    return Recipe(spec=spec, method="predictor", context_length=64, predictor_rank=RANK, density=0.2, **changes)


def networks(spec, layers):
    random = np.random.default_rng(9)
    shapes = (RANK, spec.hidden_size), (EXPERTS * WIDTH, RANK)
    return {layer: tuple(random.normal(0, 0.2, shape) for shape in shapes) for layer in layers}


@pytest.fixture(scope="module", params=["silu", "relu"])
def mixture(request, tmp_path_factory):
    """Its second layer has no predictor; all units are in DRAM, so that sums have one order."""
    recipe = recipe_of(request.param, pinned_share=1, slots_share=0)
    recipe = replace(recipe, predictors=networks(recipe.spec, (0, 2)))
    return build_artifact(tmp_path_factory.mktemp("mixture") / "a.coldpress", recipe)


@pytest.fixture(scope="module")
def on_flash(mixture, tmp_path_factory):
    """The same with a small cache."""
    recipe = replace(mixture.recipe, pinned_share=0, slots_share=1 / 8)
    return build_artifact(tmp_path_factory.mktemp("mixture") / "b.coldpress", recipe, mixture.weights)


class Oracle:
    """What a layer computes, from an artifact's codes, in float64."""

    def __init__(self, built):
        self.built, self.predictors = built, open_artifact(built.path).predictors

    def experts(self, layer, x):
        """(the two of the largest logits, their softmax)."""
        logits = self.built.weights[f"layers.{layer}.router.weight"].astype(np.float64) @ x
        top = np.sort(np.argsort(-logits)[:CHOSEN])
        return top, np.exp(logits[top]) / np.exp(logits[top]).sum()

    def ids(self, layer, x, count=0):
        """The units that a token uses; `count` of them where that is not 0."""
        own = np.concatenate([np.arange(WIDTH) + WIDTH * expert for expert in self.experts(layer, x)[0]])
        found = self.predictors.get(layer)
        if found is None:
            return own
        plugin = plugins.load("coldpress.runtime.quantization", Format, found.format)
        fc1, fc2 = plugin.decode(found.fc1, x.size), plugin.decode(found.fc2, RANK)
        scores = fc2.astype(np.float64)[own] @ np.maximum(fc1.astype(np.float64) @ x, 0)
        if count:
            return np.sort(own[np.argsort(-scores, kind="stable")[:count]])
        return own[scores >= THRESHOLD] if (scores >= THRESHOLD).any() else own[[np.argmax(scores)]]

    def output(self, layer, x, ids):
        """Of these units, weighed."""
        y = np.zeros(x.size)
        for expert, share in zip(*self.experts(layer, x), strict=True):
            gate, up, down = (
                self.built.weights[f"layers.{layer}.experts.{expert}.{name}_proj.weight"].astype(np.float64)
                for name in ("gate", "up", "down")
            )
            inner, own = gate @ x, ids[ids // WIDTH == expert] % WIDTH
            silu = self.built.recipe.spec.hidden_act == "silu"
            inner = (inner / (1 + np.exp(-inner)) if silu else np.maximum(inner, 0)) * (up @ x)
            y += share * (down[:, own] @ inner[own])
        return y


def watched(session, monkeypatch):
    """(layer, input, ids) of every choice, and (layer, inputs, outputs) of every MLP, as a session decodes."""
    choices, outputs = [], []
    select = Selection.select

    def choose(self, key, signal_TN, residency, experts_TE=None):
        chosen = select(self, key, signal_TN, residency, experts_TE)
        choices.extend((key[0], signal.copy(), ids) for signal, ids in zip(signal_TN, chosen, strict=True))
        return chosen

    monkeypatch.setattr(Selection, "select", choose)
    for number, layer in enumerate(session.decoder._layers):

        def begin(x, tokens, number=number, begin_mlp=layer.mlp.begin):
            work = begin_mlp(x, tokens)
            result = work.result

            def noted():
                y = result()
                outputs.append((number, x.copy(), y.copy()))
                return y

            work.result = noted
            return work

        monkeypatch.setattr(layer.mlp, "begin", begin)
    return choices, outputs


def decoded(session, together):
    session.decoder.begin(len(TOKENS))
    if together == 1:
        return np.stack([session.decoder.decode(token) for token in TOKENS])
    parts = np.array_split(np.array(TOKENS), len(TOKENS) // together)
    return np.concatenate([session.decoder.decode_many(part) for part in parts])


@pytest.mark.parametrize("together", [1, 4])
def test_a_token_uses_what_its_experts_scores_say(mixture, together, monkeypatch):
    oracle, session = Oracle(mixture), Session(mixture.path)
    choices, outputs = watched(session, monkeypatch)
    decoded(session, together)
    assert len(choices) == LAYERS * len(TOKENS)
    used = {layer: [] for layer in range(LAYERS)}
    for layer, x, ids in choices:
        expected = oracle.ids(layer, x.astype(np.float64))
        assert ids.tolist() == expected.tolist()
        used[layer].append(ids.size)
    assert set(used[PLAIN]) == {CHOSEN * WIDTH}
    assert 0 < np.mean(used[0]) < 0.7 * CHOSEN * WIDTH
    for layer, inputs, found in outputs:
        expected = [oracle.output(layer, x, oracle.ids(layer, x)) for x in inputs.astype(np.float64)]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


def test_tokens_together_have_what_each_has_alone(mixture):
    """Logits and requests, of one cache that everything is in."""
    seen = {}
    for together in (1, 4):
        recorder = Recorder()
        logits = decoded(Session(mixture.path, recorder=recorder), together)
        seen[together] = logits, [event for event in recorder.events if event.kind == FETCH]
    np.testing.assert_array_equal(seen[4][0], seen[1][0])
    for layer in range(LAYERS):
        alone = [event.ids for event in seen[1][1][layer : 4 * LAYERS : LAYERS]]
        assert seen[4][1][layer].ids.tolist() == np.unique(np.concatenate(alone)).tolist()


def test_as_many_of_the_largest_scores_are_used_for_every_token(tmp_path, monkeypatch):
    """Of a token's experts, however few they have."""
    units, ratio = EXPERTS * WIDTH, 0.5
    for density, expected in ((0.2, round(ratio * 0.2 * units)), (0.9, CHOSEN * WIDTH)):
        recipe = replace(recipe_of("silu", options={"topk_ratio": ratio}), density=density)
        built = build_artifact(tmp_path / f"{density}", recipe)
        oracle, session = Oracle(built), Session(built.path)
        choices, _ = watched(session, monkeypatch)
        decoded(session, 1)
        for layer, x, ids in choices:
            assert ids.size == expected
            assert ids.tolist() == oracle.ids(layer, x.astype(np.float64), expected).tolist()
        monkeypatch.undo()


def test_what_is_guessed_ahead_is_what_the_next_predictor_would_choose(mixture, on_flash, monkeypatch):
    """Of the experts that the next layer's router would pick for this layer's input."""
    oracle, recorder = Oracle(on_flash), Recorder()
    session = Session(on_flash.path, preload="on", recorder=recorder)
    choices, _ = watched(session, monkeypatch)
    found = decoded(session, 1)
    monkeypatch.undo()
    assert len(choices) == (2 * LAYERS - 1) * len(TOKENS)
    for layer, x, ids in choices:
        assert ids.tolist() == oracle.ids(layer, x.astype(np.float64)).tolist()
    guesses = [choices[place] for place in range(len(choices)) if place % (2 * LAYERS - 1) in (1, 3)]
    preloads = [event for event in recorder.events if event.kind == PRELOAD]
    assert len(preloads) == len(guesses) == (LAYERS - 1) * len(TOKENS)
    for event, (layer, _, ids) in zip(preloads, guesses, strict=True):
        assert event.layer == layer
        assert set(event.ids.tolist()) <= set(ids.tolist())
    assert session.store.counters.preload_used_bytes > 0
    expected = decoded(Session(mixture.path), 1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


def test_rows_of_other_experts_are_not_multiplied(mixture, monkeypatch):
    """Nor copied: what is multiplied lies where the predictor does."""
    session, own = Session(mixture.path), products.gemv
    second = {layer: found.fc2 for layer, found in session.artifact.predictors.items()}
    rows = []

    def counting(codes, *rest, **named):
        rows.extend(len(codes) for fc2 in second.values() if np.shares_memory(codes, fc2))
        return own(codes, *rest, **named)

    monkeypatch.setattr(products, "gemv", counting)
    decoded(session, 1)
    assert rows == [WIDTH] * (CHOSEN * len(second) * len(TOKENS))


def test_the_text_is_that_of_any_cache(mixture, on_flash):
    texts = {tuple(Session(built.path).generate(TOKENS, 8).token_ids) for built in (mixture, on_flash)}
    assert len(texts) == 1


def test_a_token_reads_of_predictors_what_it_multiplies(mixture, tmp_path):
    manifest = mixture.manifest
    without = replace(mixture.recipe, method="dense", predictors=None)
    plain = build_artifact(tmp_path / "plain", without, mixture.weights).manifest
    tensors = predictor_tensors(manifest)
    first, second = (
        layout_bytes({name: entry for name, entry in tensors.items() if name.endswith(end)}) for end in ("fc1", "fc2")
    )
    (plan,), (dense,) = manifest.plans, plain.plans
    assert plan.predictor_bytes == first + second
    assert second == 2 * EXPERTS * WIDTH * 34
    found = computed_bytes(manifest, plan).total() - computed_bytes(plain, dense).total()
    assert found == first + second * CHOSEN // EXPERTS


def test_a_reader_wants_a_row_for_every_unit_of_every_expert(tmp_path):
    """As one MLP of an expert's width would have; and all units where there is no predictor."""
    recipe = recipe_of("silu")
    built = build_artifact(tmp_path / "a", recipe)
    open_artifact(built.path)
    change_arrays(built.path, PREDICTORS_FILE, lambda arrays: arrays.update({"0.fc2": arrays["0.fc2"][:WIDTH].copy()}))
    with pytest.raises(ArtifactError, match=r"'0\.fc2'.*\[96, 34\], expected uint8 \[576, 34\]"):
        open_artifact(built.path)

    def left_out(manifest):
        manifest["predictors"].pop()
        manifest["plans"][0]["predictor_bytes"] -= RANK * 68 + EXPERTS * WIDTH * 34

    missing = build_artifact(tmp_path / "c", recipe)
    change_manifest(missing.path, left_out)
    with pytest.raises(ArtifactError, match=r"parts\[2\]\.density is 0\.2, expected 0\.333333, since layer 2 has no"):
        open_artifact(missing.path)
