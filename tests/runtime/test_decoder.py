"""The decoder against transformers, and its sparse path against its dense one."""

import math

import numpy as np
import pytest

from coldpress.runtime import arithmetic
from coldpress.runtime.decoder import decoder
from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.decoder.mlp import Mlp
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.generate.session import Session
from coldpress.schemas.errors import ArtifactError, ColdpressError, DoesNotFitError
from coldpress.schemas.families import FAMILIES
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.data import data_folder
from tests.support.hf import all_logits, greedy, load_hf, roles_of, spec_of
from tests.support.models import write_model

PROMPT = [0, 5, 9, 100, 200, 33]
PARTIAL_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
ORIGINAL_CONTEXT = {"rope_theta": 10000.0, "original_max_position_embeddings": 128}
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL_CONTEXT}}
SHORT, LONG = [1 + 0.1 * i for i in range(8)], [1.0 + i for i in range(8)]
LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **ORIGINAL_CONTEXT},
    "original_max_position_embeddings": 128,
}
SOME_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
ARCHITECTURES = {
    "llama": ("llama", {}),
    "llama tied with biases": ("llama", {"tie": True, "overrides": {"attention_bias": True, "mlp_bias": True}}),
    "llama relu": ("llama", {"relu": True}),
    "mistral with a sliding window": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "phi3 partial rotary": ("phi3", {"overrides": PARTIAL_ROTARY}),
    "qwen2 yarn": ("qwen2", {"overrides": YARN}),
    "phi3 longrope": ("phi3", {"overrides": LONGROPE}),
    "qwen3 with a window in some layers": ("qwen3", {"overrides": SOME_WINDOWS}),
    # weights that fp16 holds exactly: norms on outputs leave rounding errors as large as the weights make them
    "olmo2": ("olmo2", {"dtype": "float16"}),
    "olmo2 relu tied with biases": (
        "olmo2",
        {"dtype": "float16", "relu": True, "tie": True, "overrides": {"attention_bias": True}},
    ),
    "opt": ("opt", {}),
    "opt relu": ("opt", {"relu": True}),
    "arcee": ("arcee", {}),
    "bamboo": ("bamboo", {}),
    "mixtral": ("mixtral", {}),
    "mixtral relu tied": ("mixtral", {"relu": True, "tie": True}),
    "nemotron": ("nemotron", {}),
    "nemotron with biases": ("nemotron", {"overrides": {"attention_bias": True, "mlp_bias": True}}),
}


def close(found, expected, share):
    """Equal to `share` of the largest magnitude."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * np.abs(expected).max())


def fill(built_decoder, token_ids, num_prefilled):
    """Logits of a sequence whose first tokens are prefilled and whose others are decoded."""
    built_decoder.begin(len(token_ids))
    dense = [built_decoder.prefill(np.array(token_ids[:num_prefilled]))] if num_prefilled else []
    return np.concatenate([*dense, *(built_decoder.decode(token)[None] for token in token_ids[num_prefilled:])])


# Against transformers


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parity_with_transformers(name, tmp_path):
    model_type, options = ARCHITECTURES[name]
    model = load_hf(write_model(tmp_path / "model", model_type, num_hidden_layers=3, **options))
    spec = spec_of(model.config)
    assert (spec.rotary_scaling != 1) == (name in ("qwen2 yarn", "phi3 longrope"))
    recipe = Recipe(spec=spec, method="dense", context_length=80)
    built = build_artifact(tmp_path / "a.coldpress", recipe, roles_of(model, spec))
    session = Session(built.path)
    expected, step_logits = greedy(model, PROMPT, 48)
    assert list(session.generate(PROMPT, 48, ignore_eos=True).token_ids) == expected
    token_ids = PROMPT + expected[:-1]
    close(fill(session.decoder, token_ids, len(PROMPT))[len(PROMPT) - 1 :], step_logits, 2e-3)
    close(fill(session.decoder, token_ids, len(token_ids)), all_logits(model, token_ids), 2e-3)


@pytest.mark.parametrize(
    ("name", "families"),
    [
        ("llama", ("gate_down",)),
        ("llama tied with biases", ("mlp_in", "mlp_mid", "attn_in", "attn_out")),
        ("phi3", ("attn_in", "gate_down")),
        ("qwen3", ("attn_in", "attn_out", "up_down")),
        ("olmo2", ("attn_in", "attn_out", "mlp_in", "mlp_mid")),
        ("olmo2", ("neuron",)),
        ("olmo2", ("attn_in", "attn_out", "block")),
        ("opt", ("attn_in", "attn_out", "mlp_mid")),
        ("arcee", ("mlp_in", "mlp_mid")),
        ("nemotron", ("neuron",)),
        ("nemotron", ("block",)),
        ("bamboo", ("gate_down",)),
        ("bamboo", ("up_down",)),
        ("bamboo", ("mlp_in", "mlp_mid")),
    ],
)
def test_parity_of_every_family(name, families, tmp_path):
    """Decoded from units of any families, the logits are transformers'."""
    model_type, options = ARCHITECTURES[name]
    model = load_hf(write_model(tmp_path / "model", model_type, num_hidden_layers=11, **options))
    spec = spec_of(model.config)
    recipe = Recipe(spec=spec, method="dense", families=families, context_length=80)
    session = Session(build_artifact(tmp_path / "a.coldpress", recipe, roles_of(model, spec)).path)
    close(fill(session.decoder, TOKENS, 4), all_logits(model, TOKENS), 2e-3)


@pytest.mark.slow
def test_every_layer_has_its_own_window(tmp_path):
    """Eleven layers of two kinds: their order is that of numbers, and a long prefill and single tokens agree."""
    types = ["full_attention" if layer in (1, 2, 10) else "sliding_attention" for layer in range(11)]
    overrides = {"use_sliding_window": True, "sliding_window": 5, "layer_types": types}
    model = load_hf(write_model(tmp_path / "model", "qwen2", num_hidden_layers=11, overrides=overrides))
    spec = spec_of(model.config)
    assert [spec.window_of(layer) for layer in range(11)] == [None if "full" in kind else 5 for kind in types]
    recipe = Recipe(spec=spec, method="dense", context_length=80)
    session = Session(build_artifact(tmp_path / "a.coldpress", recipe, roles_of(model, spec)).path)
    token_ids = np.random.default_rng(4).integers(0, spec.vocab_size, 80).tolist()
    expected = all_logits(model, token_ids)
    close(fill(session.decoder, token_ids, 4), expected, 2e-3)
    close(fill(session.decoder, token_ids, 80), expected, 2e-3)
    uniform = spec.model_copy(update={"layer_types": ()})
    recipe = Recipe(spec=uniform, method="dense", context_length=80)
    session = Session(build_artifact(tmp_path / "b.coldpress", recipe, roles_of(model, uniform)).path)
    assert np.abs(fill(session.decoder, token_ids, 80) - expected).max() > 0.1, "the windows matter"


@pytest.mark.parametrize(("method", "family"), [("relu", "up_down"), ("dense", "up_down"), ("dense", "block")])
def test_parity_of_a_relu_model_with_biases(method, family, tmp_path):
    """Units of a gated MLP whose rows have biases, chosen by the gate or all of them: the logits are transformers'."""
    overrides = {"attention_bias": True, "mlp_bias": True}
    model = load_hf(write_model(tmp_path / "model", num_hidden_layers=3, relu=True, overrides=overrides))
    spec = spec_of(model.config)
    recipe = Recipe(spec=spec, method=method, families=(family,), context_length=80)
    session = Session(build_artifact(tmp_path / "a.coldpress", recipe, roles_of(model, spec)).path)
    close(fill(session.decoder, TOKENS, 4), all_logits(model, TOKENS), 2e-3)


@pytest.mark.needs_data
@pytest.mark.parametrize("name", ["stories260k", "tinystories656k-relu", "tinystories-opt-0.9m"])
def test_parity_on_trained_models(name, tmp_path):
    model = load_hf(data_folder() / "models" / name)
    spec = spec_of(model.config)
    weights = roles_of(model, spec)
    prompt = [spec.bos_token_id, 80, 147, 201, 282, 215]
    expected, step_logits = greedy(model, prompt, 64)
    built = build_artifact(
        tmp_path / "a", Recipe(spec=spec, method="dense", context_length=80, slots_share=0.5), weights
    )
    session = Session(built.path)
    assert list(session.generate(prompt, 64, ignore_eos=True).token_ids) == expected
    close(fill(session.decoder, prompt + expected[:-1], len(prompt))[len(prompt) - 1 :], step_logits, 2e-3)


# Sparse against dense


def masked(weights, chosen):
    """The weights with the columns of every unit that is not chosen set to zero."""
    result = dict(weights)
    for (layer, family), ids in chosen.items():
        roles = [piece.role for piece in FAMILIES[family].slices if piece.axis == "column"]
        for role in {f"layers.{layer}.{role}.weight" for role in roles} & weights.keys():
            result[role] = np.zeros_like(weights[role])
            result[role][:, ids] = weights[role][:, ids]
    return result


class Fixed(Selection):
    """The same units on every token."""

    is_whole = False

    def __init__(self, chosen):
        self.chosen = chosen

    def select(self, key, signal_Tn, residency, experts_TE=None):
        return [self.chosen[key]] * len(signal_Tn)


SPARSE_CASES = {
    "neuron": ("dense", {}, ("neuron",)),
    "neuron without a gate": ("dense", {"gated_mlp": False}, ("neuron",)),
    "up_down": ("relu", {}),
    "mlp_mid": ("relu", {"gated_mlp": False}),
    "mlp_in and mlp_mid": ("topk", {"hidden_act": "silu"}),
    "mlp_in and mlp_mid without a gate": ("topk", {"gated_mlp": False}),
    "neuron, LayerNorm and biases": (
        "dense",
        {"norm": "layer_norm", "position": "learned", "rotary_dim": 0},
        ("neuron",),
    ),
    "up_down, LayerNorm and biases": ("relu", {"norm": "layer_norm"}),
    "mlp_in and mlp_mid, LayerNorm and biases": ("topk", {"norm": "layer_norm", "hidden_act": "gelu_tanh"}),
}
ATTENTION = ("attn_in", "attn_out")
LAYER_NORM = {"norm": "layer_norm", "hidden_act": "silu"}
SPARSE_CASES |= {
    "gate_down": ("dense", {"hidden_act": "silu"}, ("gate_down",)),
    "gate_down, LayerNorm and biases": ("dense", LAYER_NORM, ("gate_down",)),
    "attn_in": ("dense", {}, ("attn_in",)),
    "attn_out, biases": ("dense", LAYER_NORM, ("attn_out",)),
    "attention and neuron": ("dense", {}, ("neuron", *ATTENTION)),
    "attention, inputs and mlp_mid, biases": ("dense", LAYER_NORM, ("mlp_in", "mlp_mid", *ATTENTION)),
    "attention and mlp_in": ("dense", {"gated_mlp": False}, ("attn_in", "attn_out", "mlp_in")),
}
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]


def recipe_of(name, **changes):
    method, fields, *families = SPARSE_CASES[name]
    spec = small_spec(num_hidden_layers=3, **fields)
    return Recipe(spec=spec, method=method, families=families[0] if families else None, **changes)


def draw(built, share, seed=7):
    """A random subset of every family of every layer."""
    random = np.random.default_rng(seed)
    return {
        key: np.flatnonzero(random.random(len(codes)) < share).astype(np.int32) for key, codes in built.units.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE_CASES)
@pytest.mark.parametrize("quantization", ["fp16", "int4_group32"])
def test_a_subset_equals_the_masked_dense_model(name, quantization, tmp_path):
    recipe = recipe_of(name, format=quantization)
    full = build_artifact(tmp_path / "full", recipe)
    chosen = draw(full, 0.4)
    build_artifact(tmp_path / "masked", recipe, masked(full.weights, chosen))
    session = Session(full.path)
    found = fill(Decoder(session.artifact, session.store, Fixed(chosen)), TOKENS, 0)
    expected = fill(Session(tmp_path / "masked").decoder, TOKENS, len(TOKENS))
    close(found, expected, 2e-3)
    unmasked = fill(session.decoder, TOKENS, len(TOKENS))
    assert np.abs(found - unmasked).max() > 10 * np.abs(found - expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE_CASES)
@pytest.mark.parametrize("quantization", ["fp16", "int8_group32", "int4_group32"])
def test_all_units_equal_the_dense_model(name, quantization, tmp_path):
    built = build_artifact(tmp_path / "a", recipe_of(name, format=quantization))
    session = Session(built.path, selector="dense")
    dense = fill(session.decoder, TOKENS, len(TOKENS))
    close(fill(session.decoder, TOKENS, 0), dense, 2e-3)
    close(fill(session.decoder, TOKENS, 5), dense, 2e-3)


@pytest.mark.parametrize("name", ["up_down", "mlp_mid", "up_down, LayerNorm and biases"])
def test_relu_leaves_out_only_zeros(name, tmp_path):
    built = build_artifact(tmp_path / "a", recipe_of(name))
    session = Session(built.path)
    dense = fill(session.decoder, TOKENS, len(TOKENS))
    assert session.store.counters.hits + session.store.counters.misses == 0
    close(fill(session.decoder, TOKENS, 0), dense, 2e-3)
    num_units = sum(len(codes) for codes in built.units.values())
    assert 0 < session.store.counters.hits + session.store.counters.misses < 0.7 * num_units * len(TOKENS)


def test_topk_uses_as_many_units_as_the_plan_says(tmp_path):
    built = build_artifact(tmp_path / "a", recipe_of("mlp_in and mlp_mid", density=0.25))
    session = Session(built.path)
    fill(session.decoder, TOKENS, 2)
    expected = 3 * (16 + 128) * (len(TOKENS) - 2)  # layers, a quarter of 64 and of 512 units, decoded tokens
    assert session.store.counters.hits + session.store.counters.misses == expected


def test_topk_uses_the_largest_inputs(tmp_path):
    """With all but the largest inputs zeroed by hand, the first layer gives the same."""
    built = build_artifact(tmp_path / "a", recipe_of("mlp_in and mlp_mid", density=0.25))
    session, wanted = Session(built.path), []
    selection = Selection(session.artifact, session.plan)

    class Watching(Fixed):
        def select(self, key, signal_Tn, residency, experts_TE=None):
            chosen = selection.select(key, signal_Tn, residency, experts_TE)
            wanted.extend((key[1], signal.copy(), ids) for signal, ids in zip(signal_Tn, chosen, strict=True))
            return chosen

    fill(Decoder(session.artifact, session.store, Watching({})), TOKENS, 2)
    for family, signal, ids in wanted:
        assert signal.size == (64 if family == "mlp_in" else 512)
        rest = np.delete(np.abs(signal), ids)
        assert np.abs(signal[ids]).min() >= rest.max()


# The prefill


def test_the_chunk_size_does_not_change_the_logits(tmp_path, monkeypatch):
    spec = small_spec(num_hidden_layers=2, max_position_embeddings=128, sliding_window=20)
    built = build_artifact(tmp_path / "a", Recipe(spec=spec, context_length=100))
    session = Session(built.path)
    token_ids = list(np.random.default_rng(2).integers(0, 96, 100))
    whole = fill(session.decoder, token_ids, 100)
    reads = session.store.counters.prefill_reads
    monkeypatch.setattr(decoder, "PREFILL_CHUNK_TOKENS", 7)
    close(fill(session.decoder, token_ids, 100), whole, 2e-3)
    assert session.store.counters.prefill_reads == reads + math.ceil(100 / 7) * reads
    session.decoder.begin(100)
    close(session.decoder.prefill_last(np.array(token_ids)), whole[-1], 2e-3)


def test_the_prefill_works_with_a_small_read_buffer(tmp_path):
    recipe = recipe_of("neuron")
    large, small = build_artifact(tmp_path / "a", recipe), recipe_of("neuron", read_buffer_bytes=8192)
    build_artifact(tmp_path / "b", small)
    assert large.recipe.read_buffer_bytes > 8192
    expected = fill(Session(tmp_path / "a").decoder, TOKENS, len(TOKENS))
    close(fill(Session(tmp_path / "b").decoder, TOKENS, len(TOKENS)), expected, 1e-4)


# What is refused


@pytest.fixture
def session(relu_artifact):
    return Session(relu_artifact.path)


def test_a_token_outside_the_vocabulary_is_refused(session):
    session.decoder.begin(4)
    with pytest.raises(ColdpressError, match="token id 96 is outside the vocabulary, expected 0 to 95"):
        session.decoder.prefill(np.array([1, 96]))
    with pytest.raises(ColdpressError, match="token id -1"):
        session.decoder.decode(-1)


def test_a_full_context_is_refused(session):
    session.decoder.begin(3)
    session.decoder.prefill(np.array([1, 2]))
    session.decoder.decode(3)
    with pytest.raises(DoesNotFitError, match="1 more tokens do not fit the context: 3 of 3 are in use"):
        session.decoder.decode(4)


def test_a_context_beyond_the_plan_is_refused(session):
    with pytest.raises(DoesNotFitError, match="make 33 tokens, the plan 'test' has a KV cache for 32"):
        session.decoder.begin(33)


def test_an_empty_prompt_is_refused(session):
    session.decoder.begin(4)
    with pytest.raises(ColdpressError, match="the prompt has no tokens"):
        session.decoder.prefill_last(np.array([], np.int64))


def test_families_that_make_no_mlp_are_refused(relu_artifact):
    with pytest.raises(ArtifactError, match="keeps neuron, mlp_mid on flash, expected families from which a gated"):
        Mlp(0, relu_artifact.recipe.spec, ("neuron", "mlp_mid"), None)
    for families in (("up_down", "gate_down"), ("mlp_in", "up_down"), ("mlp_in", "neuron")):
        with pytest.raises(ArtifactError, match=f"keeps {', '.join(families)} on flash"):
            Mlp(0, relu_artifact.recipe.spec, families, None)
    for families in (("up_down",), ("gate_down",)):
        with pytest.raises(ArtifactError, match=f"keeps {families[0]} on flash, .* an ungated MLP"):
            Mlp(0, small_spec(gated_mlp=False), families, None)


def test_keys_beyond_fp16_are_refused(tmp_path):
    spec = small_spec(num_hidden_layers=2)
    built = build_artifact(tmp_path / "a", Recipe(spec=spec))
    weights = dict(built.weights) | {"layers.1.k_proj.bias": np.full(32, 1e6, np.float32)}
    build_artifact(tmp_path / "b", Recipe(spec=spec), weights)
    with pytest.raises(ColdpressError, match="layer 1: a key or value is beyond 65504"):
        fill(Session(tmp_path / "b").decoder, [1, 2], 2)


# Arithmetic


def test_erf():
    x = np.linspace(-6, 6, 20001, dtype=np.float32)
    np.testing.assert_allclose(arithmetic.erf(x), [math.erf(value) for value in x.astype(float)], rtol=0, atol=5e-7)


@pytest.mark.parametrize("name", ["relu", "relu2", "silu", "gelu", "gelu_tanh"])
def test_activations_agree_with_transformers(name):
    import torch
    from transformers.activations import ACT2FN

    names = {"gelu_tanh": "gelu_pytorch_tanh"}
    x = np.concatenate([np.linspace(-12, 12, 4001), [-200, 200, 0]]).astype(np.float32)
    expected = ACT2FN[names.get(name, name)](torch.from_numpy(x)).numpy()
    found = arithmetic.activation(name)(x)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("limit", [7.0, 0.3])
def test_the_activation_of_gpt_oss_agrees_with_transformers(limit):
    from types import SimpleNamespace

    import torch
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    random = np.random.default_rng(0)
    gate, up = (np.concatenate([random.normal(0, 4, 2000), [-200, 200, 0, limit, -limit]]) for _ in range(2))
    gate, up = random.permutation(gate).astype(np.float32), up.astype(np.float32)
    both = torch.from_numpy(np.stack([gate, up], axis=1).reshape(-1))
    expected = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=limit), both).numpy()
    found = arithmetic.activation("swiglu_oai", limit)(gate) * arithmetic.up_activation("swiglu_oai", limit)(up)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=5e-6)


def test_norms_agree_with_torch():
    import torch

    random = np.random.default_rng(0)
    x = (random.normal(size=(3, 64)) * 5 + 2).astype(np.float32)
    weight, bias = random.normal(size=(2, 64)).astype(np.float32)
    tensors = [torch.from_numpy(array) for array in (x, weight, bias)]
    rms = torch.nn.functional.rms_norm(tensors[0], (64,), tensors[1], 1e-5).numpy()
    layer = torch.nn.functional.layer_norm(tensors[0], (64,), tensors[1], tensors[2], 1e-5).numpy()
    np.testing.assert_allclose(arithmetic.rms_norm(x, weight, 1e-5), rms, rtol=0, atol=1e-5)
    np.testing.assert_allclose(arithmetic.layer_norm(x, weight, bias, 1e-5), layer, rtol=0, atol=1e-5)
