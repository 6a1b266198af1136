"""A mixture of experts: a token asks for the units of its own experts, alone and with others, and computes the same."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from coldpress.runtime.artifact.errors import SectionError
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli.inspect import describe, render
from coldpress.runtime.decoder.blocks import StreamedBlock
from coldpress.runtime.decoder.mlp import Experts, per_expert
from coldpress.runtime.decoder.tokens import Tokens
from coldpress.runtime.generate.session import Session
from coldpress.runtime.trace import FETCH, PRELOAD, Recorder
from coldpress.runtime.unit_numbers import distinct
from coldpress.schemas.errors import ArtifactError, ColdpressError
from coldpress.schemas.families import num_units
from coldpress.schemas.model import MLP_ROLES, matrices, role_shape
from tests.support.artifacts import Recipe, build_artifact, change_manifest, random_weights, small_spec
from tests.support.data import ROOT

EXPERTS, CHOSEN, WIDTH, LAYERS = 6, 2, 96, 3
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]


KINDS = {
    "silu": {},
    "gpt_oss": {"hidden_act": "swiglu_oai", "activation_threshold": 0.5, "attention_sinks": True},
}
"""The latter with biases of the experts, too."""


def spec_of(**changes):
    mixture = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "intermediate_size": WIDTH, "hidden_act": "silu"}
    return small_spec(num_hidden_layers=LAYERS, **(mixture | changes))


def weights_of(spec):
    random = np.random.default_rng(7)
    weights = random_weights(spec, random)
    if spec.attention_sinks:
        biased = [name for role in MLP_ROLES for name in matrices(role, spec)]
        for role in (f"layers.{layer}.{name}.bias" for layer in range(LAYERS) for name in biased):
            weights[role] = random.normal(0, 0.3, role_shape(spec, role)).astype(np.float32)
    return weights


FAMILIES = [("neuron",), ("block",), ("mlp_in", "mlp_mid"), ("up_down",), ("gate_down",), ("mlp_mid",)]


@pytest.fixture(scope="module", params=FAMILIES, ids="+".join)
def families(request):
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def spec(request):
    return spec_of(**KINDS[request.param])


@pytest.fixture(scope="module")
def mixture(families, spec, tmp_path_factory):
    recipe = Recipe(spec=spec, method="dense", context_length=64, families=families)
    return build_artifact(tmp_path_factory.mktemp("mixture") / "a.coldpress", recipe, weights_of(spec))


@pytest.fixture(scope="module")
def in_dram(families, spec, tmp_path_factory):
    """The same with all units in DRAM, so that sums have one order."""
    recipe = Recipe(spec=spec, method="dense", context_length=64, pinned_share=1, slots_share=0, families=families)
    return build_artifact(tmp_path_factory.mktemp("mixture") / "b.coldpress", recipe, weights_of(spec))


def decoded(session, tokens):
    session.decoder.begin(len(tokens))
    return np.stack([session.decoder.decode(token) for token in tokens])


def experts_of(events, family, kind=FETCH):
    """Of each request of a family the experts whose units it asks for, all of them."""
    found, each = [], num_units(family, spec_of()) // EXPERTS
    for event in (event for event in events if event.kind == kind and event.family == family):
        experts, counts = np.unique(event.ids // each, return_counts=True)
        assert kind == PRELOAD or (counts == each).all()
        found.append(frozenset(experts.tolist()))
    return found


def test_a_token_asks_for_its_experts_alone(mixture, families):
    recorder = Recorder()
    decoded(Session(mixture.path, recorder=recorder), TOKENS)
    asked = experts_of(recorder.events, families[-1])
    assert len(asked) == LAYERS * len(TOKENS)
    assert all(len(experts) == CHOSEN for experts in asked)
    assert len(set(asked)) > EXPERTS
    assert all(experts_of(recorder.events, family) == asked for family in families)


def test_what_lies_where_changes_nothing(families, mixture, tmp_path):
    """The same weights in whole neurons, with no matrix of an expert in DRAM."""
    built = build_artifact(tmp_path / "a", replace(mixture.recipe, families=("neuron",)), mixture.weights)
    expected = decoded(Session(built.path), TOKENS)
    found = decoded(Session(mixture.path), TOKENS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


def test_a_layer_gives_what_its_experts_give_weighed(mixture):
    """Held against the formula, with the weights in float64; prefilled."""
    session, layer, spec = Session(mixture.path), 1, mixture.recipe.spec
    decoder, random = session.decoder, np.random.default_rng(4)
    x = random.normal(size=(5, spec.hidden_size)).astype(np.float32)
    mlp, parts = decoder._layers[layer].mlp, [slice(0, 5)]
    work = mlp.begin(x, Tokens((), None, parts))
    for key in mlp.requests:
        work.signal(key)
        for ids, codes in session.store.stream(key):
            work.add(key, StreamedBlock(ids, codes, decoder._units[key]))
    found = work.result()
    weights = {role: values.astype(np.float64) for role, values in mixture.weights.items()}
    expected = np.zeros((5, spec.hidden_size))
    for token, logits in enumerate(x @ weights[f"layers.{layer}.router.weight"].T):
        top = np.argsort(-logits)[:CHOSEN]
        for expert, share in zip(top, np.exp(logits[top]) / np.exp(logits[top]).sum(), strict=True):
            gate, up, down = (
                weights[f"layers.{layer}.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            biases = [
                weights.get(f"layers.{layer}.experts.{expert}.{name}_proj.bias", 0) for name in ("gate", "up", "down")
            ]
            of_gate, of_up, slope = gate @ x[token] + biases[0], up @ x[token] + biases[1], 1.0
            if spec.attention_sinks:
                of_gate, of_up, slope = np.minimum(of_gate, 0.5), np.clip(of_up, -0.5, 0.5) + 1, 1.702
            inner = of_gate / (1 + np.exp(-slope * of_gate)) * of_up
            expected[token] += share * (down @ inner + biases[2])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("method", ["topk", "dip"])
def test_a_selector_chooses_among_a_tokens_experts(method, tmp_path):
    """So many of their inputs, the largest, from each expert alike."""
    built = build_artifact(
        tmp_path / "a", Recipe(spec=spec_of(), method=method, context_length=64, density=CHOSEN / EXPERTS / 2)
    )
    recorder = Recorder()
    decoded(Session(built.path, recorder=recorder), TOKENS)
    hidden = built.recipe.spec.hidden_size
    for event in (event for event in recorder.events if event.kind == FETCH and event.family == "mlp_in"):
        experts, counts = np.unique(event.ids // hidden, return_counts=True)
        assert counts.tolist() == [hidden // 2] * CHOSEN
        one, other = (event.ids[event.ids // hidden == expert] % hidden for expert in experts)
        assert one.tolist() == other.tolist()


def test_each_expert_that_a_token_uses_gets_its_input():
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    chosen = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0]], bool)
    seen = per_expert(x, chosen)
    assert seen.shape == (3, 12)
    assert not seen.reshape(3, 3, 4)[~chosen].any()
    assert (seen.reshape(*chosen.shape, -1)[chosen] == np.repeat(x, chosen.sum(axis=1), axis=0)).all()


def test_an_expert_whose_weight_is_nothing_is_used_like_others(mixture, families):
    """A softmax may underflow: what a token uses is what the router chose, and only its output counts for nothing."""
    mlp, random = Session(mixture.path).decoder._layers[0].mlp, np.random.default_rng(4)
    x = random.normal(size=(2, mlp._spec.hidden_size)).astype(np.float32)
    chosen = np.array([[1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0]], bool)
    known = {role: random.normal(size=(2, EXPERTS, WIDTH)).astype(np.float32) for role in MLP_ROLES}
    usual, tiny = (np.where(chosen, np.float32(weight), np.float32(0)) for weight in (0.5, 0))
    expected, found = (mlp.inner_signal(x, known, chosen, weights) for weights in (usual, tiny))
    if mlp.inner.signal == "mlp_inner":  # multiplied by the weight
        assert expected.any()
        assert not found.any()
    else:
        np.testing.assert_array_equal(found, expected)


def test_tokens_together_have_what_each_has_alone(in_dram, families):
    alone, together = Recorder(), Recorder()
    expected = decoded(Session(in_dram.path, recorder=alone), TOKENS)
    decoder = Session(in_dram.path, recorder=together).decoder
    decoder.begin(len(TOKENS))
    found = np.concatenate([decoder.decode_many(np.array(TOKENS[:3])), decoder.decode_many(np.array(TOKENS[3:]))])
    np.testing.assert_array_equal(found, expected)
    one_by_one, at_once = (experts_of(seen.events, families[0]) for seen in (alone, together))
    for layer, experts in enumerate(at_once[:LAYERS]):
        assert experts == frozenset.union(*one_by_one[layer : 3 * LAYERS : LAYERS])


def test_a_draft_that_is_taken_back_leaves_nothing(in_dram):
    decoder = Session(in_dram.path).decoder
    expected = decoded(Session(in_dram.path), TOKENS)
    decoder.begin(len(TOKENS) + 2)
    decoder.decode_each([np.array([*TOKENS[:2], 7, 8])], [0], [1])
    decoder.accept([2], [4])
    np.testing.assert_array_equal(np.stack([decoder.decode(token) for token in TOKENS[2:]]), expected[2:])


@pytest.mark.slow
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


def test_what_is_preloaded_is_of_the_experts_that_the_next_layer_would_choose(mixture, families):
    if families[0] not in ("neuron", "block", "mlp_in"):
        with pytest.raises(ColdpressError, match="leave nothing to preload"):
            Session(mixture.path, preload="on")
        return
    recorder = Recorder()
    session = Session(mixture.path, preload="on", recorder=recorder)
    expected = decoded(Session(mixture.path), TOKENS)
    np.testing.assert_allclose(decoded(session, TOKENS), expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    guessed = experts_of(recorder.events, families[0], PRELOAD)
    assert len(guessed) == (LAYERS - 1) * len(TOKENS)
    assert all(len(experts) == CHOSEN for experts in guessed)
    assert session.store.counters.preload_used_bytes > 0


def test_inspect_says_how_many_experts_there_are(mixture):
    artifact = open_artifact(mixture.path)
    assert "intermediate 96, 4 heads, 2 of keys, 2 of 6 experts a token)" in render(
        describe(artifact), artifact.manifest.model
    )


@pytest.mark.parametrize("kept", [("mlp_in",), ("attn_in",)], ids="+".join)
def test_down_of_experts_lies_on_flash(kept, tmp_path):
    build_artifact(tmp_path / "a", Recipe(spec=spec_of(), method="dense", families=kept))
    with pytest.raises(ArtifactError, match="expected one that holds down_proj: a mixture has it on flash"):
        open_artifact(tmp_path / "a")


def test_families_of_which_no_expert_is_made_are_refused(tmp_path):
    build_artifact(tmp_path / "a", Recipe(spec=spec_of(), method="dense", families=("mlp_in", "neuron")))
    with pytest.raises(
        SectionError, match=r"families is .*mlp_in.*neuron.*, expected families from which experts can be computed"
    ):
        open_artifact(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"keeps mlp_in, neuron on flash, expected .* experts can be computed"):
        Experts(0, spec_of(), ("mlp_in", "neuron"), None)


def test_more_experts_than_are_listed_are_refused_before_they_are_looped_over(tmp_path):
    path = build_artifact(tmp_path / "a", Recipe(spec=spec_of(), method="dense", families=("up_down",))).path
    change_manifest(path, lambda manifest: manifest["model"].update(num_experts=1 << 40))
    with pytest.raises(ArtifactError, match=r"num_experts is 1099511627776, expected at most \d+, the number"):
        open_artifact(path)


def test_what_a_mixture_cannot_have_is_refused(tmp_path):
    build_artifact(tmp_path / "a", Recipe(spec=spec_of(num_experts_per_tok=7), method="dense"))
    with pytest.raises(ArtifactError, match="num_experts_per_tok is 7, expected at most 6 experts"):
        open_artifact(tmp_path / "a")


GENERATING = """
import sys
from coldpress.runtime.generate.session import Session
with Session(sys.argv[1]) as session:
    session.generate([3, 14, 15, 92], 4, ignore_eos=True)
print("numpy.ma" in sys.modules)
"""


def test_a_text_loads_no_masked_arrays(tmp_path):
    """np.unique does: 4 MB outside the budget."""
    path = build_artifact(tmp_path / "a", Recipe(spec=spec_of(), method="dense")).path
    command = [sys.executable, "-c", GENERATING, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_distinct_numbers_ascend():
    random = np.random.default_rng(3)
    for size, dtype in ((0, np.int64), (1, np.uint16), (500, np.int32), (500, np.uint16)):
        numbers_N = random.integers(0, 90, size).astype(dtype)
        found = distinct(numbers_N)
        assert found.dtype == dtype
        assert found.tolist() == sorted(set(numbers_N.tolist()))
