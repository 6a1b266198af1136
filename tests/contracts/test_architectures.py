"""Every architecture, found by its file name: its record, its tensors and its forward pass against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.activity.layer_counts import exact_families
from coldpress.compiler.activity.rounded import RoundedKeys
from coldpress.compiler.architectures import Architecture, _common, granite
from coldpress.compiler.architectures._declared import declared
from coldpress.compiler.checkpoint.shapes import read_shapes
from coldpress.compiler.checkpoint.source_config import checked_config
from coldpress.compiler.checkpoint.tensors import read_role, rotary_inv_freq
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.workflow import settings
from coldpress.runtime.arithmetic import rms_norm
from coldpress.runtime.decoder import decoder
from coldpress.runtime.decoder.tokens import KvCache
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plugins import load, names
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model, ModelSpec, block_norms, role_shape
from tests.support.artifacts import Recipe, build_artifact
from tests.support.hf import all_logits, load_hf
from tests.support.models import MIXTURES, MODEL_TYPES, write_model, write_tokenizer

ARCHITECTURES = names("coldpress.compiler.architectures")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 1.9, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 24}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "no window": ("mistral", {"sliding_window": None}),
    "window in all layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0},
    ),
    "window in some layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "phi3 window": ("phi3", {"sliding_window": 20}),
    "partial rotary": ("phi3", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "raw softmax": ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 6, "num_experts_per_tok": 3}),
    "all experts": ("qwen3_moe", {"num_experts_per_tok": 4, "attention_bias": True, "moe_intermediate_size": 96}),
    "layers without experts": ("qwen3_moe", {"mlp_only_layers": [0], "num_key_value_heads": 1}),
    "experts in every other layer": ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "every other window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2, "qkv_bias": False},
    ),
    "named windows of experts": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "groups of experts": (
        "glm4_moe",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "latent queries": (
        "deepseek_v2",
        {"q_lora_rank": 40, "attention_bias": True, "rms_norm_eps": 1e-4, "first_k_dense_replace": 0},
    ),
    "latents in groups of experts": (
        "deepseek_v2",
        {
            "n_routed_experts": 8,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 16.0,
        },
    ),
    "latents with yarn as published": (
        "deepseek_v2",
        {
            "rope_parameters": ...,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 40,
            },
            "q_lora_rank": 24,
        },
    ),
    "latents with two factors of yarn": (
        "deepseek_v2",
        {
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
            "v_head_dim": 48,
        },
    ),
    "two shared experts": (
        "glm4_moe",
        {"n_shared_experts": 2, "use_qk_norm": False, "attention_bias": True, "first_k_dense_replace": 0},
    ),
    "whole rotary glm": ("glm4_moe", {"partial_rotary_factor": 1.0, "head_dim": 24}),
    "gpt_oss as published": (
        "gpt_oss",
        {
            "rope_parameters": ...,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
            "swiglu_limit": 7.0,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
        },
    ),
    "gpt_oss without biases, its yarn by default": (
        "gpt_oss",
        {"attention_bias": False, "rope_parameters": ..., "num_key_value_heads": 4, "head_dim": 64},
    ),
    "gpt_oss own layers": (
        "gpt_oss",
        {
            "layer_types": [("sliding_attention", "full_attention")[layer in (0, 1, 7)] for layer in range(12)],
            "intermediate_size": 96,
            "swiglu_limit": 0.1,
            "num_experts_per_tok": 1,
        },
    ),
    "gpt_oss no windows": ("gpt_oss", {"layer_types": ["full_attention"] * 12}),
    "granitemoe biases": ("granitemoe", {"attention_bias": True, "num_experts_per_tok": 4, "rope_parameters": LLAMA3}),
    "granitemoe without factors": ("granitemoe", dict.fromkeys(granite.MULTIPLIERS, ...) | {"num_local_experts": 7}),
    "experts and a window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    "normed olmoe": ("olmoe", {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 4}),
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "longrope to its original context": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 70},
    ),
    "no biases": ("opt", {"enable_bias": False}),
    "arcee biases": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "gemma2 without caps and windows": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * 12,
            "attention_bias": True,
        },
    ),
    "gemma2 hard caps": (
        "gemma2",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 50.0, "rope_parameters": LLAMA3, "head_dim": 16},
    ),
    "gemma2 usual scale": ("gemma2", {"query_pre_attn_scalar": 32, "num_key_value_heads": 1}),
    "gemma3 own layers": (
        "gemma3_text",
        {
            "layer_types": [("full_attention", "sliding_attention")[layer in (0, 2, 10)] for layer in range(12)],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 500.0}},
            "final_logit_softcapping": 40.0,
            "attention_bias": True,
        },
    ),
    "gemma3 old spelling": (
        "gemma3_text",
        {
            "rope_parameters": ...,
            "rope_theta": 30000.0,
            "rope_local_base_freq": 700.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
        },
    ),
    "gemma3 all windows": ("gemma3_text", {"layer_types": ["sliding_attention"] * 12}),
    "gemma3 one kind of llama3": (
        "gemma3_text",
        {
            "layer_types": ["full_attention"] * 12,
            "rope_parameters": {"full_attention": LLAMA3, "sliding_attention": LLAMA3},
        },
    ),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "granite wide heads": ("granite", {"head_dim": 24, "attention_multiplier": 1}),
    "granite without factors": ("granite", dict.fromkeys(granite.MULTIPLIERS, ...)),
    "smollm3 own layers": (
        "smollm3",
        {"no_rope_layers": [int(layer not in (0, 3, 4, 10)) for layer in range(13)], "rope_parameters": YARN},
    ),
    "smollm3 windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 20, "no_rope_layer_interval": 3, "mlp_bias": True},
    ),
    "smollm3 windows of other layers": (
        "smollm3",
        {
            "sliding_window": 20,
            "layer_types": [("full_attention", "sliding_attention")[layer in (1, 3, 11)] for layer in range(12)],
            "attention_bias": True,
        },
    ),
    "smollm3 no positions": ("smollm3", {"no_rope_layers": [0] * 12}),
    "olmo2 biases": ("olmo2", {"attention_bias": True, "rope_parameters": YARN, "num_key_value_heads": 1}),
    "phi norms of q and k": ("phi", {"qk_layernorm": True, "num_key_value_heads": 1}),
    "phi rotates more": (
        "phi",
        {"hidden_act": "gelu_new", "rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.75}},
    ),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt_neox old spelling": (
        "gpt_neox",
        {"rope_parameters": ..., "rotary_pct": 1.0, "rotary_emb_base": 500.0, "hidden_act": "gelu_fast"},
    ),
    "gpt_neox linear": ("gpt_neox", {"rope_parameters": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.0}}),
    "stablelm norms of heads": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm biases": (
        "stablelm",
        {"use_qkv_bias": True, "num_key_value_heads": 1, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    ),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "falcon new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon new, one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
    ),
    "falcon one after the other": ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon all key heads": (
        "falcon",
        {"multi_query": False, "rope_parameters": LLAMA3, "max_position_embeddings": ...},
    ),
    "glm4 without biases": ("glm4", {"attention_bias": False, "head_dim": 24}),
    "glm4 rotates whole heads": (
        "glm4",
        {"rope_parameters": {**LLAMA3, "partial_rotary_factor": 1.0}, "num_key_value_heads": 1},
    ),
    "nemotron biases": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "nemotron's own share": ("nemotron", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
}
LAYERS: dict[str, int] = dict.fromkeys(("gemma2", "gemma3_text", "gpt_oss", "smollm3"), 12)
"""Layers of models whose layers differ; others have two."""
CASES = {
    **{f"{kind}{' relu' * relu}{' tied' * tie}": (kind, {}, relu, tie) for kind in ARCHITECTURES
       for relu, tie in ((False, False), (True, True))},
    **{name: (kind, changes, False, False) for name, (kind, changes) in VARIANTS.items()},
}  # fmt: skip


SMALL = {
    **{"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "ffn_dim": 96, "word_embed_proj_dim": 64},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "kv_lora_rank": 32},
}
"""Sizes that tests give transformers' own configurations, as far as a class has them."""
ROUNDED_KEYS, SAME_KEYS, UNROUNDED = 2e-3, 1e-3, 1e-5
"""Largest error of logits over the largest logit: against transformers, which keeps keys and values in float32; against
transformers with keys and values in fp16; and with a cache in float32 on both sides."""


def test_every_architecture_has_a_test_model() -> None:
    assert ARCHITECTURES == MODEL_TYPES


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_read_without_transformers_as_with_it(tmp_path: Path, case: str) -> None:
    """It is asked only where it alone knows the factors of a rotary embedding."""
    kind, changes, relu, tie = CASES[case]
    write_model(tmp_path, kind, num_hidden_layers=LAYERS.get(kind, 2), relu=relu, tie=tie, overrides=changes)
    architecture, believed = checked_config(json.loads((tmp_path / "config.json").read_text()))
    ours = _common.filled(architecture, believed)
    asked = any(scaling in f"{case} {changes}" for scaling in ("yarn", "longrope"))
    assert (ours is None) == asked
    if ours is not None:
        assert_same(architecture, believed)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize(
    "more",
    [{}, {"max_window_layers": 5}, {"use_sliding_window": True, "max_window_layers": 5}],
)
def test_defaults_are_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    """Of a config.json that has no key but the required ones."""
    sizes: dict[str, Any] = {"vocab_size": 999, "hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 32}
    sizes |= {"max_position_embeddings": 8192} | ({"hidden_act": "relu"} if kind == "bamboo" else {})
    if kind == "deepseek_v2":  # which has no default for it
        sizes["num_experts_per_tok"] = 6
    if kind == "gpt_oss":  # whose own rotation is YaRN, which only transformers knows
        sizes["rope_parameters"] = {"rope_type": "default"}
    architecture, believed = checked_config({"model_type": kind, **sizes, **more})
    assert_same(architecture, believed)


def of_class(kind: str) -> Any:
    """Returns transformers' own configuration, small, and otherwise with its defaults."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    sizes = {key: size for key, size in SMALL.items() if key in default.to_dict() or key in default.attribute_map}
    if kind == "deepseek_v2":  # the rotated part of a head is its `head_dim`; each has its own keys
        del sizes["head_dim"], sizes["num_key_value_heads"]
    return AutoConfig.for_model(kind, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "bamboo"])
def test_checkpoints_that_transformers_writes_itself(tmp_path: Path, kind: str) -> None:
    """Its configuration has keys and spellings of its own; logits, and the shapes that a quote reads, are the same."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(of_class(kind)).half()
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim > 1:
                values.normal_(0, 0.08)
    model.save_pretrained(tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny", SMALL["vocab_size"])
    found = ingest.run(IngestConfig(model=str(tmp_path / "tiny")), Workspace(tmp_path / "work", "test"))
    assert read_shapes(tmp_path / "tiny" / "config.json").spec == found.spec
    tokens = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (1, 24)).astype(np.int32)
    with torch.no_grad():
        expected = load_hf(tmp_path / "tiny")(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(LayerStream(found, threads=2).logits(tokens), expected, rtol=0, atol=1e-4)
    assert np.std(expected) > 0.3


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_a_class_declares_is_read_from_its_source(kind: str) -> None:
    """Defaults and types, for a class that is imported; a version that has no such class declares nothing."""
    import dataclasses

    from transformers import AutoConfig

    architecture = load("coldpress.compiler.architectures", Architecture, kind)
    theirs = type(AutoConfig.for_model(architecture.MODULES.built_of or kind))
    fields = {field.name: field for field in dataclasses.fields(theirs)}
    read = [key for key in _common.KEYS | architecture.KEYS if key in fields]
    assert {"vocab_size", "tie_word_embeddings", "eos_token_id"} <= {*read}
    for key in read:
        if key in architecture.declared().defaults or key != "max_position_embeddings":  # some give it as a product
            assert architecture.declared().defaults[key] == fields[key].default
        is_flag = isinstance(fields[key].default, bool)
        assert ("bool" in architecture.declared().types[key]) == is_flag or fields[key].default is None
    assert declared(kind, "no_such_package").defaults == {}


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "bamboo"])
def test_other_names_of_keys_are_those_of_the_class(kind: str) -> None:
    """A key that transformers reads under two names is read under both; two numbers for one setting are refused."""
    architecture = load("coldpress.compiler.architectures", Architecture, kind)
    config = of_class(kind)
    pairs = {frozenset(pair) for pair in config.attribute_map.items()}
    assert pairs == {frozenset(pair) for pair in architecture.spellings().items()}
    raw = json.loads(json.dumps(config.to_dict(), default=str))
    _, expected = checked_config(raw)
    for other, key in architecture.spellings().items():
        value = raw.get(key, raw.get(other))
        spelled = {name: raw[name] for name in raw if name not in (key, other)}
        assert checked_config({**spelled, key: value})[1] == checked_config({**spelled, other: value})[1] == expected
        with pytest.raises(CheckpointError, match=f"{key} is .* and {other} .*, expected one number"):
            checked_config({**spelled, key: value, other: value + 1})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "bamboo"])
def test_nulls_and_missing_keys_give_a_quote_what_they_give_a_build(kind: str) -> None:
    raw = json.loads(json.dumps(of_class(kind).to_dict(), default=str))
    for key in sorted(raw.keys() - {"model_type"}):
        for changed in ({**raw, key: None}, {name: raw[name] for name in raw if name != key}):
            specs: list[Any] = []
            for fill in (_common.filled, lambda *_: None):
                try:
                    architecture, believed = checked_config(changed)
                    source = fill(architecture, believed) or _common.source_config(architecture.MODULES, believed)
                    specs.append(architecture.spec(source))
                except CheckpointError as error:
                    specs.append(CheckpointError if "transformers refuses" not in str(error) else str(error))
            assert specs[0] == specs[1], key


def assert_same(architecture: Architecture, believed: dict[str, Any]) -> None:
    ours, theirs = _common.filled(architecture, believed), _common.source_config(architecture.MODULES, believed)
    spec = architecture.spec(theirs)
    assert architecture.spec(ours) == spec
    assert architecture.parameters(ours, spec) == architecture.parameters(theirs, spec)


def made(folder: Path, kind: str, changes: dict[str, Any], relu: bool, tie: bool) -> Model:
    """Writes and ingests a model whose weights fp16 holds exactly."""
    layers = LAYERS.get(kind, 2)
    options: dict[str, Any] = {"relu": relu, "tie": tie, "num_shards": 2, "dtype": "float16"}
    write_model(folder, kind, num_hidden_layers=layers, overrides=changes, **options)
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


class Case:
    """A model of a case: its record, transformers' own model, and a dense artifact in fp16, which holds the weights
    exactly."""

    def __init__(self, folder: Path, kind: str, changes: dict[str, Any], relu: bool, tie: bool) -> None:
        self.folder = folder / "tiny"
        self.model = made(self.folder, kind, changes, relu, tie)
        self.spec = self.model.spec
        self.whole = load_hf(self.folder)
        self.artifact = dense_artifact(self.model, folder / "a.coldpress", min(80, self.spec.max_position_embeddings))


TIED = ("llama", "opt", "gemma2", "phi", "mixtral", "glm4_moe")
"""Architectures whose tied case `make test` runs, too: tied heads are one piece of code."""
ALONE = [
    pytest.param(case, id=name, marks=[pytest.mark.slow] * (case[3] and case[0] not in TIED))
    for name, case in CASES.items()
]


@pytest.fixture(scope="module", params=ALONE)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"), *request.param)


@pytest.mark.slow
def test_logits_equal_those_of_transformers(case: Case) -> None:
    """The streamed pass sees our re-serialised config and roles; transformers reads the checkpoint by itself."""
    import torch

    tokens = np.random.default_rng(0).integers(0, case.spec.vocab_size, (3, 50)).astype(np.int32)
    stream = LayerStream(case.model, threads=2)
    with torch.no_grad():
        expected = case.whole(torch.from_numpy(tokens).long(), labels=torch.from_numpy(tokens).long())
    found = stream.logits(tokens)
    assert np.abs(found - expected.logits.numpy()).max() < 1e-4
    assert np.std(found) > 0.5
    total, count = stream.nll(tokens)
    assert total / count == pytest.approx(expected.loss.item(), abs=1e-4)


def dense_artifact(model: Model, folder: Path, context_length: int) -> Path:
    """Writes a dense artifact in fp16."""
    roles = {role: read_role(model, role) for role in model.tensors}
    roles |= {role: rotary_inv_freq(model, kind) for kind, role in model.spec.frequencies.items()}
    return build_artifact(folder, Recipe(spec=model.spec, method="dense", context_length=context_length), roles).path


def test_decoded_tokens_and_logits_equal_those_of_transformers(case: Case) -> None:
    """The runtime computes from the spec and the roles, past windows and the original length of scaled positions.

    Its greedy tokens are those of transformers, which reads each of them after the same beginning.
    """
    prompt = np.random.default_rng(4).integers(0, case.spec.vocab_size, 50)
    session = Session(case.artifact)
    session.decoder.begin(68)
    steps = [session.decoder.prefill(prompt)[-1]]
    for _ in range(68 - len(prompt) - 1):
        steps.append(session.decoder.decode(int(steps[-1].argmax())))
    one_by_one = np.stack(steps)
    token_ids = np.array([*prompt, *one_by_one.argmax(axis=1)[:-1]])
    session.decoder.begin(len(token_ids))
    prefilled = session.decoder.prefill(token_ids)[len(prompt) - 1 :]
    for half, limit in ((False, ROUNDED_KEYS), (True, SAME_KEYS)):
        expected = all_logits(case.whole, token_ids.tolist(), half_keys=half)[len(prompt) - 1 :]
        for found in (prefilled, one_by_one):
            error = limit * np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=error)
            second, first = np.sort(expected, axis=1)[:, -2:].T
            clear = first - second > 2 * error  # otherwise rounding decides
            assert clear.sum() > len(clear) / 2
            assert np.array_equal(found[clear].argmax(axis=1), expected[clear].argmax(axis=1))


@pytest.mark.slow
def test_without_rounding_of_keys_and_values_nothing_differs_from_transformers(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill can keep its cache in float32: then only the order of sums is left."""

    def unrounded(spec: ModelSpec, context_length: int, _kind: str) -> KvCache:
        shape = spec.num_hidden_layers, context_length, spec.num_key_value_heads, spec.head_dim
        keys = np.zeros(shape, np.float32)
        return KvCache(keys, keys if spec.is_latent else np.zeros(shape, np.float32))

    monkeypatch.setattr(decoder, "new_cache", unrounded)
    tokens = np.random.default_rng(1).integers(0, case.spec.vocab_size, 70)
    session = Session(case.artifact)
    session.decoder.begin(len(tokens))
    expected = all_logits(case.whole, tokens.tolist())
    found = session.decoder.prefill(tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=UNROUNDED * np.abs(expected).max())


def test_roles_have_the_shapes_that_the_spec_gives(case: Case) -> None:
    tensors = case.model.tensors
    for role, source in tensors.items():
        assert source.shape == role_shape(case.spec, role)
        assert sum(stop - start for start, stop in source.runs()) == source.shape[0]
    modules = {role.split(".")[-2] for role in tensors if role.startswith("layers.1.")}
    of_values = "kv_b_proj" if case.spec.is_latent else "v_proj"
    assert {*block_norms(case.spec), "q_proj", "k_proj", of_values, "o_proj"} <= modules
    assert ("gate_proj" in modules) == case.spec.gated_mlp
    assert ("lm_head.weight" in tensors) != case.spec.tie_word_embeddings


def test_shapes_are_those_of_the_checkpoint(case: Case) -> None:
    """As config.json alone gives them, before a download."""
    found = read_shapes(case.folder / "config.json")
    assert {role: tensor.shape for role, tensor in found.tensors.items()} == {
        role: source.shape for role, source in case.model.tensors.items()
    }
    assert found.spec == case.spec
    assert found.num_parameters == case.model.num_parameters


def test_frequencies_equal_those_of_transformers(case: Case) -> None:
    if case.spec.position == "learned":
        assert (case.spec.rotary_dim, case.spec.position_offset) == (0, 2)
        return
    modules = load("coldpress.compiler.architectures", Architecture, case.spec.model_type).MODULES
    module: Any = case.whole.get_submodule(f"{modules.base}.rotary_emb")
    prefixes = {"main": "", "local": ""}
    if case.spec.model_type == "gemma3_text":
        prefixes = {"main": "full_attention_", "local": "sliding_attention_"}
    for kind in case.spec.frequencies:
        frequencies = getattr(module, f"{prefixes[kind]}inv_freq").numpy()
        assert np.array_equal(rotary_inv_freq(case.model, kind), frequencies)
        assert case.spec.rotary_dim == 2 * len(frequencies)
        if kind == "main":
            assert case.spec.rotary_scaling == getattr(module, f"{prefixes[kind]}attention_scaling")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind not in MIXTURES])
def test_hooks_see_the_parts_of_the_mlp(kind: str, tmp_path: Path) -> None:
    """What the hooks get, put through the MLP by hand with the roles' own weights, gives what the layer adds."""
    import torch

    changes = {"mlp_bias": True} if kind == "llama" else {}
    model = made(tmp_path / "tiny", kind, changes, relu=True, tie=False)
    tokens = np.arange(36, dtype=np.int32).reshape(2, 18)
    seen: dict[str, dict[int, np.ndarray]] = {"input": {}, "activation": {}, "inner": {}, "up": {}}

    def hooks(block: int) -> Hooks:
        def keep(name: str) -> Any:
            return lambda part: seen[name].update({block: part.numpy().copy()})

        return {f"mlp_{name}": keep(name) for name in seen}

    stream = LayerStream(model, threads=2)
    hidden = stream.embed(tokens)
    after = stream.run_layer(0, hidden, hooks)
    without = stream.run_layer(0, hidden, lambda block: {"mlp_inner": torch.zeros_like}).numpy()

    def linear(name: str, x: np.ndarray, bias: bool = True) -> np.ndarray:
        role = f"layers.0.{name}_proj"
        added = read_role(model, f"{role}.bias") if bias and f"{role}.bias" in model.tensors else 0
        return x @ read_role(model, f"{role}.weight").T + added

    for block in (0, 1):
        x, activation, inner = (seen[name][block] for name in ("input", "activation", "inner"))
        first = linear("gate" if model.spec.gated_mlp else "up", x)
        power = 2 if kind in ("arcee", "nemotron") else 1
        assert np.allclose(activation, np.maximum(first, 0) ** power, atol=1e-5)
        second = linear("up", x) if model.spec.gated_mlp else np.ones_like(activation)
        up = np.maximum(second, 0) if kind == "bamboo" else second
        assert np.allclose(inner, activation * up, atol=1e-5)
        assert not model.spec.gated_mlp or np.allclose(seen["up"][block], up, atol=1e-5)
        assert 0 < np.mean(inner == 0) < 1
        added, given = after[block].numpy() - without[block], linear("down", inner, bias=False)
        if model.spec.norm_placement != "before":
            weight = read_role(model, f"layers.0.{block_norms(model.spec)[-1]}.weight")
            weight = weight + np.float32(1) if model.spec.norm == "rms_norm_1p" else weight
            given = rms_norm(given.astype(np.float32), weight, model.spec.norm_eps)
        assert np.allclose(added, given * np.float32(model.spec.residual_multiplier), atol=1e-5)
        assert np.abs(added).max() > 0.01


def test_hooks_see_the_parts_of_every_expert(tmp_path: Path) -> None:
    """A unit of an expert that a token does not use is zero, and the formula of the paper gives what the layer adds."""
    import torch

    model = made(tmp_path / "tiny", "mixtral", {}, relu=True, tie=False)
    tokens, width = np.arange(18, dtype=np.int32)[None], model.spec.intermediate_size
    names = ("router_logits", "mlp_input", "mlp_activation", "mlp_up", "mlp_inner")
    seen: dict[str, np.ndarray] = {}

    def hooks(block: int) -> Hooks:
        def keep(name: str) -> Any:
            return lambda part: seen.update({name: part.numpy().copy()})

        return {name: keep(name) for name in names}

    stream = LayerStream(model)
    hidden = stream.embed(tokens)
    added = stream.run_layer(0, hidden, hooks) - stream.run_layer(0, hidden, lambda _: {"mlp_inner": torch.zeros_like})

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ read_role(model, f"layers.0.{name}.weight").T

    logits = linear("router", seen["mlp_input"])
    assert np.allclose(seen["router_logits"], logits, atol=1e-5)
    assert len({tuple(row) for row in np.argsort(logits, axis=1)[:, -2:].tolist()}) > 2
    expected = np.zeros_like(seen["mlp_input"])
    for token, x in enumerate(seen["mlp_input"]):
        chosen = np.argsort(-logits[token])[:2]
        shares = np.exp(logits[token, chosen]) / np.exp(logits[token, chosen]).sum()
        left = {name: seen[name][token].reshape(-1, width).copy() for name in names[2:]}
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (linear(f"experts.{expert}.{name}_proj", x) for name in ("gate", "up"))
            parts = {"mlp_activation": np.maximum(gate, 0), "mlp_up": up, "mlp_inner": share * np.maximum(gate, 0) * up}
            for name, values in parts.items():
                assert np.allclose(left[name][expert], values, atol=1e-5)
                left[name][expert] = 0
            expected[token] += linear(f"experts.{expert}.down_proj", parts["mlp_inner"])
        assert not any(values.any() for values in left.values())
    assert np.allclose(added.numpy()[0], expected, atol=1e-5)
    assert np.abs(expected).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_activation_that_is_not_named_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """The DAG, which does without transformers, knows of exact zeros what the record of `ingest` says."""
    key = load("coldpress.compiler.architectures", Architecture, kind).MODULES.activation_key
    if kind == "bamboo":  # whose default is refused
        with pytest.raises(CheckpointError, match="hidden_act is 'silu' in a model of type bamboo, expected 'relu'"):
            made(tmp_path / "tiny", kind, {key: ...}, relu=True, tie=False)
        return
    model = made(tmp_path / "tiny", kind, {key: ...}, relu=True, tie=False)
    modules = load("coldpress.compiler.architectures", Architecture, kind).MODULES
    named = "swiglu_oai" if kind == "gpt_oss" else _common.activation(modules.activation)
    assert model.spec.hidden_act == named
    assert settings.resolve({"model": str(tmp_path / "tiny")}).model.exact_zeros == model.spec.exact_zeros


def test_zeros_of_up_are_exact_where_it_passes_a_relu(tmp_path: Path) -> None:
    families = ("neuron", "up_down", "gate_down", "mlp_in", "mlp_mid", "attn_in")
    specs = {kind: made(tmp_path / kind, kind, {}, True, False).spec for kind in ("bamboo", "llama", "arcee")}
    assert exact_families(families, specs["bamboo"]) == {"neuron", "up_down", "gate_down", "mlp_mid"}
    assert exact_families(families, specs["llama"]) == {"neuron", "up_down", "mlp_mid"}
    assert exact_families(families, specs["arcee"]) == {"neuron", "up_down", "mlp_mid"}
    assert (specs["bamboo"].hidden_act, specs["arcee"].hidden_act) == ("drelu", "relu2")


def test_longrope_keeps_to_the_original_context(tmp_path: Path) -> None:
    model = made(tmp_path / "tiny", *VARIANTS["longrope"], False, False)
    assert model.spec.max_position_embeddings == 128
    assert model.spec.rotary_scaling > 1
    assert json.loads(Path(model.folder, "config.json").read_text())["max_position_embeddings"] == 256


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_with_long_factors_a_text_beyond_the_original_context_is_that_of_transformers(
    tmp_path: Path, spelling: str
) -> None:
    """transformers reads the checkpoint by itself, and takes the long factors for a text of 200 tokens, beyond 128."""
    _, changes = VARIANTS["longrope"]
    folder = write_model(tmp_path / "tiny", "phi3", num_hidden_layers=2, dtype="float16", overrides=changes)
    if spelling == "rope_scaling":  # as published checkpoints have it
        config = json.loads((folder / "config.json").read_text())
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
        (folder / "config.json").write_text(json.dumps(config))
    model = ingest.run(IngestConfig(model=str(folder), longrope="long"), Workspace(tmp_path / "work", "test"))
    assert model.spec.max_position_embeddings == 256
    tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, 200)
    expected = all_logits(load_hf(folder), tokens.tolist())
    found = LayerStream(model, threads=2).logits(tokens[None].astype(np.int32))[0]
    assert np.abs(found - expected).max() < 1e-4
    with Session(dense_artifact(model, tmp_path / "a", tokens.size)) as session:
        session.decoder.begin(tokens.size)
        decoded = np.stack([session.decoder.decode(int(token)) for token in tokens])
    assert np.abs(decoded - expected).max() < 1e-3 * np.abs(expected).max()


def test_long_factors_need_longrope(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", "llama", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="the rope type is default, expected longrope, since longrope=long"):
        ingest.run(IngestConfig(model=str(folder), longrope="long"), Workspace(tmp_path / "work", "test"))


def test_windows_and_contexts(tmp_path: Path) -> None:
    assert made(tmp_path / "a", "mistral", {}, False, False).spec.sliding_window == 48
    assert made(tmp_path / "b", "mistral", {"sliding_window": 256}, False, False).spec.sliding_window is None
    assert made(tmp_path / "c", "qwen3", {}, False, False).spec.head_dim == 32


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "normed weights of latents": (
        "deepseek_v2",
        {"norm_topk_prob": True},
        "norm_topk_prob is true in a model of type deepseek_v2, which is not supported, expected false",
    ),
    "biases of shared experts": ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is true in a model of type deepseek_v2"),
    "another choice of experts": (
        "deepseek_v2",
        {"topk_method": "noaux_tc"},
        "topk_method is 'noaux_tc', expected greedy or group_limited_greedy",
    ),
    "groups without a number": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy"},
        "n_group is None and topk_group None, expected numbers of groups",
    ),
    "groups that hold too few": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
        "num_experts_per_tok is 2, expected at most 1, the experts of its groups",
    ),
    "alibi": ("falcon", {"alibi": True}, "alibi is true, and positions other than rotary ones are not supported"),
    "falcon new, one after the other": (
        "falcon",
        {"new_decoder_architecture": True, "parallel_attn": False},
        "parallel_attn is false, expected true with new_decoder_architecture",
    ),
    "falcon old, two norms": ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2, expected 1"),
    "falcon half the key heads": (
        "falcon",
        {"multi_query": False, "num_kv_heads": 2},
        "num_kv_heads is 2, expected 4, the number of heads",
    ),
    "both directions": (
        "gemma2",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention is not supported",
    ),
    "a cap that is ignored": (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        "expected null: transformers ignores it",
    ),
    "rotation of a third kind": (
        "gemma3_text",
        {"rope_parameters": {"chunked_attention": {"rope_theta": 10.0}}},
        "expected an entry for each of full_attention, sliding_attention only",
    ),
    "a factor for windows": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": YARN}},
        "sliding_attention multiplies cos and sin by 1.13",
    ),
    "windows without a length": (
        "smollm3",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None},
        "sliding_window is null, but layer_types names layers with a window",
    ),
    "too few flags": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries, expected one for each of 2"),
    "flags that are none": (
        "smollm3",
        {"no_rope_layers": [2, 0]},
        r"no_rope_layers is \[2, 0\], expected a list of 0 and 1",
    ),
    "another activation": (
        "gpt_oss",
        {"hidden_act": "relu"},
        "hidden_act is 'relu' in a model of type gpt_oss, expected",
    ),
    "another slope": (
        "gpt_oss",
        {"swiglu_alpha": 1.5},
        "swiglu_alpha is 1.5 in a model of type gpt_oss, expected 1.702",
    ),
    "a negative limit": ("gpt_oss", {"swiglu_limit": -7.0}, "swiglu_limit is -7.0, expected a number above 0"),
    "packed in another way": ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "is quantized already"),
    "packed where nothing is": (
        "granitemoe",
        {"quantization_config": {"quant_method": "mxfp4"}},
        "the checkpoint is quantized already",
    ),
    "no factor": ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0, expected a number above 0"),
    "frequencies by length": (
        "phi",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_parameters.rope_type is 'dynamic', expected one of default",
    ),
}


def test_a_number_without_default_is_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny", "deepseek_v2", num_hidden_layers=2)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    del config["num_experts_per_tok"]
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_experts_per_tok is missing, expected the experts that a token uses"):
        ingest.run(IngestConfig(model=str(tmp_path / "tiny")), Workspace(tmp_path / "work", "test"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    kind, changes, sentence = REFUSED[name]
    write_model(tmp_path / "tiny", kind, num_hidden_layers=2)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text()) | changes
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=sentence):
        ingest.run(IngestConfig(model=str(tmp_path / "tiny")), Workspace(tmp_path / "work", "test"))


def test_latents_have_keys_for_every_head_whatever_the_configuration_says(tmp_path: Path) -> None:
    """transformers' class reads no number of key heads: the latents' matrix has keys for each of the heads."""
    specs = []
    for heads in (4, 2):
        write_model(tmp_path / f"{heads}", "deepseek_v2", num_hidden_layers=2, overrides={"num_key_value_heads": heads})
        work = Workspace(tmp_path / f"work{heads}", "test")
        specs.append(ingest.run(IngestConfig(model=str(tmp_path / f"{heads}")), work).spec)
    assert specs[0] == specs[1]


@pytest.mark.slow
def test_a_cache_in_int8_rounds_the_keys_of_every_architecture(tmp_path: Path) -> None:
    """Whatever a layer calls its cache; sums over 32 codes of 8 bits stay near, and are not equal."""
    for kind in ("llama", "gemma2", "gpt_neox", "falcon"):
        model = made(tmp_path / kind, kind, {}, False, False)
        tokens = np.arange(40, dtype=np.int32)[None]
        stream = LayerStream(model)
        exact, rounded = stream.logits(tokens), RoundedKeys(stream, "int8").logits(tokens)
        assert 0 < np.abs(exact - rounded).max() < 0.1 * np.abs(exact).max(), kind
