"""A mixture of experts: a token asks for the units of its own experts, alone and with others, and computes the same."""

import numpy as np
import pytest

from runtime._inspect import describe, render
from runtime.artifact.reader import open_artifact
from runtime.generate import Session
from runtime.model.mlp import routed
from runtime.trace import FETCH, PRELOAD, Recorder
from schemas.errors import ArtifactError
from tests.support.artifacts import Recipe, build_artifact, small_spec

EXPERTS, CHOSEN, WIDTH, LAYERS = 6, 2, 96, 3
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]


def spec_of(**changes):
    mixture = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "intermediate_size": WIDTH}
    return small_spec(num_hidden_layers=LAYERS, hidden_act="silu", **(mixture | changes))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    recipe = Recipe(spec=spec_of(), method="dense", context_length=64)
    return build_artifact(tmp_path_factory.mktemp("mixture") / "a.coldpress", recipe)


@pytest.fixture(scope="module")
def in_dram(tmp_path_factory):
    """The same with all units in DRAM, so that sums have one order."""
    recipe = Recipe(spec=spec_of(), method="dense", context_length=64, pinned_share=1, slots_share=0)
    return build_artifact(tmp_path_factory.mktemp("mixture") / "b.coldpress", recipe)


def decoded(session, tokens):
    session.decoder.begin(len(tokens))
    return np.stack([session.decoder.decode(token) for token in tokens])


def experts_of(events, kind=FETCH):
    """Of each request the experts whose units it asks for, all of them."""
    found = []
    for event in (event for event in events if event.kind == kind):
        experts, counts = np.unique(event.ids // WIDTH, return_counts=True)
        assert kind == PRELOAD or (counts == WIDTH).all()
        found.append(frozenset(experts.tolist()))
    return found


def test_a_token_asks_for_its_experts_alone(mixture):
    recorder = Recorder()
    decoded(Session(mixture.path, recorder=recorder), TOKENS)
    asked = experts_of(recorder.events)
    assert len(asked) == LAYERS * len(TOKENS)
    assert all(len(experts) == CHOSEN for experts in asked)
    assert len(set(asked)) > EXPERTS


def test_tokens_together_have_what_each_has_alone(in_dram):
    alone, together = Recorder(), Recorder()
    expected = decoded(Session(in_dram.path, recorder=alone), TOKENS)
    decoder = Session(in_dram.path, recorder=together).decoder
    decoder.begin(len(TOKENS))
    found = np.concatenate([decoder.decode_many(np.array(TOKENS[:3])), decoder.decode_many(np.array(TOKENS[3:]))])
    np.testing.assert_array_equal(found, expected)
    one_by_one, at_once = experts_of(alone.events), experts_of(together.events)
    for layer, experts in enumerate(at_once[:LAYERS]):
        assert experts == frozenset.union(*one_by_one[layer : 3 * LAYERS : LAYERS])


def test_a_draft_that_is_taken_back_leaves_nothing(in_dram):
    decoder = Session(in_dram.path).decoder
    expected = decoded(Session(in_dram.path), TOKENS)
    decoder.begin(len(TOKENS) + 2)
    decoder.decode_many(np.array([*TOKENS[:2], 7, 8]), num_kept=1)
    decoder.accept(2, 4)
    np.testing.assert_array_equal(np.stack([decoder.decode(token) for token in TOKENS[2:]]), expected[2:])


def test_prompts_together_have_the_logits_of_each_alone(mixture):
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 96, length) for length in (1, 20, 7)]
    decoder = Session(mixture.path).decoder
    expected = []
    for prompt in prompts:
        decoder.begin(len(prompt))
        expected.append(decoder.prefill_last(prompt))
    decoder.begin_batch([len(prompt) for prompt in prompts])
    np.testing.assert_array_equal(decoder.prefill_each(prompts, [0, 1, 2]), np.stack(expected))
    dense = decoded(Session(mixture.path), prompts[1].tolist())[-1]
    np.testing.assert_allclose(dense, expected[1], rtol=0, atol=2e-3 * np.abs(dense).max())


def test_what_is_read_ahead_is_of_the_experts_that_the_next_layer_would_choose(mixture):
    recorder = Recorder()
    session = Session(mixture.path, preload="on", recorder=recorder)
    expected = decoded(Session(mixture.path), TOKENS)
    np.testing.assert_allclose(decoded(session, TOKENS), expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    guessed = experts_of(recorder.events, PRELOAD)
    assert len(guessed) == (LAYERS - 1) * len(TOKENS)
    assert all(len(experts) == CHOSEN for experts in guessed)
    assert session.store.counters.preload_used_bytes > 0


def test_inspect_says_how_many_experts_there_are(mixture):
    artifact = open_artifact(mixture.path)
    assert "intermediate 96, 4 heads, 2 of keys, 2 of 6 experts a token)" in render(
        describe(artifact), artifact.manifest.model
    )


def test_the_router_takes_the_largest_and_the_lower_of_equals():
    logits = np.array([[1, 3, 2, 3], [0, 0, 0, 0], [-200, 5, -200, -200]], np.float32)
    chosen, weights = routed(logits, 2)
    assert chosen.tolist() == [[False, True, False, True], [True, True, False, False], [True, True, False, False]]
    np.testing.assert_allclose(weights[:2], [[0, 0.5, 0, 0.5], [0.5, 0.5, 0, 0]])
    np.testing.assert_allclose(weights[2], [0, 1, 0, 0])


@pytest.mark.parametrize("families", [("up_down",), ("mlp_in", "mlp_mid"), ("attn_in",), ("expert",)])
def test_only_whole_neurons_of_experts_lie_on_flash(families, tmp_path, monkeypatch):
    if families == ("expert",):
        monkeypatch.setattr("tests.support.artifacts.encode_units", lambda *_: np.zeros((EXPERTS, 36864), np.uint8))
    build_artifact(tmp_path / "a", Recipe(spec=spec_of(), method="dense", families=families))
    with pytest.raises(ArtifactError, match="expected neuron, whose units hold the experts of a mixture whole"):
        open_artifact(tmp_path / "a")


def test_what_a_mixture_cannot_have_is_refused(tmp_path):
    build_artifact(tmp_path / "a", Recipe(spec=spec_of(num_experts_per_tok=7), method="dense"))
    with pytest.raises(ArtifactError, match="num_experts_per_tok is 7, expected at most 6 experts"):
        open_artifact(tmp_path / "a")
    build_artifact(tmp_path / "b", Recipe(spec=spec_of(), method="predictor"))
    with pytest.raises(ArtifactError, match="expected none: this version predicts no units of experts"):
        open_artifact(tmp_path / "b")
