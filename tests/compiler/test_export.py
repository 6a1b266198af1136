"""export: what gguf's own reader and transformers' own GGUF loader find in the file is what the artifact holds."""

import os
import tracemalloc
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from coldpress.compiler.checkpoint.tensors import read_role, rotary_inv_freq
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import export, ingest
from coldpress.compiler.stages.export import ExportConfig, _llama_cpp
from coldpress.compiler.stages.export import gguf as gguf_target
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.runtime import plugins
from coldpress.runtime.generate.session import Session
from coldpress.schemas.errors import ArtifactError, ColdpressError, UnknownNameError
from coldpress.schemas.model import role_shape
from coldpress.schemas.package import Package
from tests.support.artifacts import Built, Recipe, build_artifact, change_manifest, random_weights, small_spec
from tests.support.dense_codes import flash_values, resident_values
from tests.support.gguf_cases import WITH_MORE
from tests.support.hf import all_logits, load_hf, roles_of, spec_of
from tests.support.llama_library import LlamaLibrary
from tests.support.models import write_model
from tests.support.records import PROVENANCE

IDS_ALONE = {"gguf_tokenizer": False}
SPEC: dict[str, Any] = {"hidden_act": "silu", "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 64}


def packaged(built: Built) -> Package:
    sha256 = Session(built.path).artifact.sha256
    sizes = {"artifact_bytes": 1, "flash_bytes": 1, "resident_bytes": 1, "predictor_bytes": 0}
    return Package(folder=str(built.path), manifest_sha256=sha256, provenance=PROVENANCE, **sizes)


def run(built: Built, file, **options):
    config = ExportConfig(export="gguf", options=IDS_ALONE | options, file=str(file))
    return export.run(config, packaged(built))


def tensors_of(file) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


def facts_of(file) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def in_pairs(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + half of each head become rows 2i and 2i + 1."""
    found, width = np.empty_like(matrix), len(matrix) // heads
    for head in range(heads):
        for i in range(width // 2):
            found[head * width + 2 * i] = matrix[head * width + i]
            found[head * width + 2 * i + 1] = matrix[head * width + width // 2 + i]
    return found


def expected_values(built: Built) -> dict[str, np.ndarray]:
    """Every tensor by llama.cpp's name: the artifact's values as the runtime's own store and reader give them."""
    session, found = Session(built.path), {}
    names = {
        **{"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"},
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output"},
        **{"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"},
        **{"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "router": "ffn_gate_inp"},
    }
    experts: dict[str, dict[int, np.ndarray]] = {}
    for role, values in (resident_values(session.artifact) | flash_values(session)).items():
        if role != "rotary.inv_freq":
            *before, module, kind = role.split(".")
            heads = {"q_proj": 4, "k_proj": 2}.get(module, 0)
            prefix = f"blk.{before[1]}." if before else ""
            if "experts" in before:
                experts.setdefault(f"{prefix}{names[module]}_exps.{kind}", {})[int(before[3])] = values
            else:
                found[f"{prefix}{names[module]}.{kind}"] = in_pairs(values, heads) if heads else values
    return found | {name: np.stack([own[expert] for expert in range(11)]) for name, own in experts.items()}


MIXTURE: dict[str, Any] = SPEC | {"model_type": "mixtral", "num_experts": 11, "num_experts_per_tok": 2}
"""More experts than digits, so that their numbers are no texts."""
GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_act": "gelu",
    "norm": "rms_norm_1p",
    "norm_placement": "around",
}
DEEPSEEK: dict[str, Any] = MIXTURE | {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 1,
    "head_dim": 24,
    "kv_lora_rank": 16,
    "rotary_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "rotary_pairs": "neighbours",
    "norm_eps": 1e-6,
    "router_normed": False,
    "shared_intermediate_size": 96,
}
CASES = {
    "fp16": (Recipe(small_spec(**SPEC), method="dense"), "F16", set()),
    "int8_group32": (Recipe(small_spec(**SPEC), method="dense", format="int8_group32"), "Q8_0", set()),
    "int4_group32": (
        Recipe(small_spec(**SPEC), method="dense", format="int4_group32", layers_per_group=2),
        "Q4_0",
        set(),
    ),
    "neurons": (
        Recipe(small_spec(**SPEC), families=("neuron",), method="dense", format="int4_group32"),
        "Q4_0",
        {"ffn_down"},
    ),
    "columns": (
        Recipe(small_spec(**SPEC), method="topk", format="int8_group32"),
        "Q8_0",
        {"ffn_gate", "ffn_up", "ffn_down"},
    ),
    "experts": (Recipe(small_spec(**MIXTURE), method="dense"), "F16", set()),
    "experts_int8": (
        Recipe(small_spec(**MIXTURE), method="dense", format="int8_group32", layers_per_group=2),
        "Q8_0",
        set(),
    ),
    "experts_int4": (
        Recipe(small_spec(**MIXTURE), families=("neuron", "attn_in"), method="dense", format="int4_group32"),
        "Q4_0",
        {"ffn_down_exps", "attn_q", "attn_k", "attn_v"},
    ),
}


def is_float(name: str, values: np.ndarray) -> bool:
    return values.ndim == 1 or "ffn_gate_inp" in name


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    recipe, kind, rounded = CASES[request.param]
    folder = tmp_path_factory.mktemp("export")
    built = build_artifact(folder / "a", recipe)
    return built, run(built, folder / "a.gguf"), kind, rounded


def test_values_are_the_artifact_s(case):
    """To the bit where rows were encoded, or nothing is lost; else within what rounding once more costs."""
    built, record, kind, rounded = case
    found, expected = tensors_of(record.file), expected_values(built)
    assert found.keys() == expected.keys()
    assert {name.split(".")[2] for name in record.rounded} == rounded
    step = {"F16": 0, "Q8_0": 1 / 127, "Q4_0": 1 / 8}[kind]
    for name, values in expected.items():
        tensor = found[name]
        assert tensor.tensor_type.name == (
            "F32" if is_float(name, values) else kind if name.startswith("blk") else "F16" if kind == "F16" else "Q8_0"
        )
        got = dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        if name not in record.rounded:
            assert got.tobytes() == np.ascontiguousarray(values, np.float32).tobytes(), name
        else:
            assert 0 < np.abs(got - values).max() <= step * np.abs(values).max(), name


def test_the_file_says_what_it_is(case):
    built, record, kind, _ = case
    facts, spec = facts_of(record.file), built.recipe.spec
    wanted = {
        "general.architecture": "llama",
        "general.file_type": int(gguf.LlamaFileType[f"MOSTLY_{kind}"]),
        "llama.context_length": spec.max_position_embeddings,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 16,
        "coldpress.artifact_sha256": packaged(built).manifest_sha256,
        "coldpress.num_rounded_tensors": len(record.rounded),
        "tokenizer.ggml.model": "none",
    }
    assert {name: facts[name] for name in wanted} == wanted
    assert facts.get("coldpress.rounded_tensors", []) == list(record.rounded)
    assert facts["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert "llama.rope.scaling.type" not in facts


@pytest.mark.parametrize("units", [96, 72])
@pytest.mark.parametrize(("stored", "given"), [("fp16", SPEC), ("int4_group32", SPEC), ("int4_group32", MIXTURE)])
def test_bytes_are_those_that_are_announced(tmp_path, stored, given, units):
    """From shapes alone, for whoever has to find the room: also where rows are no whole blocks, and become F16."""
    built = build_artifact(
        tmp_path / "a", Recipe(small_spec(**given | {"intermediate_size": units}), method="dense", format=stored)
    )
    session = Session(built.path)
    held = resident_values(session.artifact) | flash_values(session)
    shapes = {role: values.shape for role, values in held.items() if role != "rotary.inv_freq"}
    for kind in ("stored", "F16", "Q8_0", "Q4_0"):
        file = run(built, tmp_path / "a.gguf", gguf_type=kind).file
        announced = gguf_target.Plugin().disk_bytes(shapes, stored, gguf_target.Options(gguf_type=kind))
        assert announced == sum(int(tensor.n_bytes) for tensor in tensors_of(file).values()), kind


def test_the_same_artifact_gives_the_same_bytes_anywhere(case, tmp_path):
    built, record, _, _ = case
    again = run(built, tmp_path / "deeper" / "other.gguf")
    assert again.sha256 == record.sha256
    assert again.size_bytes == os.stat(record.file).st_size
    assert os.listdir(tmp_path / "deeper") == ["other.gguf"]


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_another_type_is_llama_cpp_s_own_rounding(case, tmp_path, kind):
    """gguf's quantizer, which gives llama.cpp's bits, on the artifact's values."""
    built, _, _, _ = case
    record = run(built, tmp_path / "a.gguf", gguf_type=kind)
    expected = expected_values(built)
    for name, tensor in tensors_of(record.file).items():
        values = np.ascontiguousarray(expected[name], np.float32)
        if is_float(name, values):
            assert tensor.tensor_type.name == "F32"
        else:
            assert tensor.tensor_type.name == kind
            codes = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
            assert np.asarray(tensor.data).tobytes() == codes.tobytes(), name


def test_rows_that_are_no_multiple_of_a_block_become_f16(tmp_path):
    built = build_artifact(
        tmp_path / "a", Recipe(small_spec(**SPEC | {"intermediate_size": 72}), method="dense", format="int8_group32")
    )
    record = run(built, tmp_path / "a.gguf")
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors_of(record.file).items()}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")
    assert set(record.rounded) == {"blk.0.ffn_down.weight", "blk.1.ffn_down.weight"}


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 32}),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}),
        ("qwen3", {"head_dim": 32}),
        ("nemotron", {}),
    ],
)
def test_transformers_computes_the_same_from_the_file(tmp_path, model_type, overrides):
    """It has a reader of GGUF of its own, which undoes what llama.cpp wants done to each architecture.

    That reader does not learn from the file that there are biases, or how wide Qwen3's heads are.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = {"num_key_value_heads": 2} | overrides
    source = load_hf(write_model(tmp_path / "m", model_type, num_hidden_layers=2, dtype="float16", overrides=config))
    spec = spec_of(source.config)
    built = build_artifact(tmp_path / "a", Recipe(spec, method="dense"), roles_of(source, spec))
    run(built, tmp_path / "a.gguf")
    loaded: Any = AutoModelForCausalLM
    told = {"config": source.config} if "mlp_bias" in overrides or model_type == "qwen3" else {}
    found = loaded.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32, **told).eval()
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, 24).tolist()
    np.testing.assert_allclose(all_logits(found, ids), all_logits(source, ids), atol=2e-3, rtol=0)
    assert not run(built, tmp_path / "a.gguf").rounded
    if model_type == "mistral":
        assert facts_of(tmp_path / "a.gguf")["llama.context_length"] == 32


OLMOE = {"router_normed": False, "qk_norm": "width", "num_key_value_heads": 4, "tie_word_embeddings": False}
SHARED = {"shared_intermediate_size": 64, "router_normed": False, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("mixtral", "llama", {}),
        ("qwen3_moe", "qwen3moe", {}),
        (
            "olmoe",
            "olmoe",
            {"router_normed": False, "qk_norm": "width", "num_key_value_heads": 4, "tie_word_embeddings": False},
        ),
        ("qwen2_moe", "qwen2moe", SHARED),
    ],
)
def test_llama_cpp_computes_the_same_from_a_mixture_s_file(tmp_path, kind, name, changes):
    """transformers reads no such file; rotated heads, the router's softmax and each expert are llama.cpp's own here."""
    spec, random = small_spec(**MIXTURE | {"model_type": kind} | changes), np.random.default_rng(0)
    weights = random_weights(spec, random)
    more = {"qwen2_moe": ["shared_expert_gate"], "olmoe": ["q_norm", "k_norm"], "qwen3_moe": ["q_norm", "k_norm"]}
    for layer in range(spec.num_hidden_layers):
        for role in (f"layers.{layer}.{module}.weight" for module in more.get(kind, ())):
            weights[role] = random.normal(1, 0.1, role_shape(spec, role)).astype(np.float32)
        for role in (f"layers.{layer}.{module}_proj.bias" for module in "qkv" if kind == "qwen2_moe"):
            weights[role] = random.normal(0, 0.1, role_shape(spec, role)).astype(np.float32)
    built = build_artifact(tmp_path / "a", Recipe(spec, method="dense"), weights)
    facts = facts_of(run(built, tmp_path / "a.gguf").file)
    assert (facts[f"{name}.expert_count"], facts[f"{name}.expert_used_count"]) == (11, 2)
    pytest.importorskip("xllamacpp")
    ids = np.random.default_rng(0).integers(0, 64, 24)
    engine, decoder = LlamaLibrary(tmp_path / "a.gguf", 32, 64), Session(built.path).decoder
    decoder.begin(ids.size)
    expected = decoder.prefill(ids)
    for count in (1, 7, 24):
        engine.begin()
        found, largest = engine.next_logits(ids[:count].tolist()), np.abs(expected).max()
        np.testing.assert_allclose(found, expected[count - 1], atol=2e-3 * largest, rtol=0)
    engine.close()


@pytest.mark.parametrize("name", WITH_MORE)
def test_llama_cpp_computes_what_transformers_does(tmp_path, name):
    """Of architectures with more than a plain model has, past their windows."""
    pytest.importorskip("xllamacpp")
    kind, overrides = WITH_MORE[name]
    write_model(tmp_path / "m", kind, num_hidden_layers=12, dtype="float16", overrides=overrides)
    model = ingest.run(IngestConfig(model=str(tmp_path / "m")), Workspace(tmp_path / "w", "test"))
    roles = {role: read_role(model, role) for role in model.tensors}
    roles |= {role: rotary_inv_freq(model, kind) for kind, role in model.spec.frequencies.items()}
    built = build_artifact(tmp_path / "a", Recipe(model.spec, method="dense"), roles)
    run(built, tmp_path / "a.gguf")
    ids = np.random.default_rng(0).integers(0, model.spec.vocab_size, 48)
    expected = all_logits(load_hf(tmp_path / "m"), ids.tolist())
    engine = LlamaLibrary(tmp_path / "a.gguf", 64, model.spec.vocab_size)
    for count in (1, 7, 48):
        engine.begin()
        found = engine.next_logits(ids[:count].tolist())
        np.testing.assert_allclose(found, expected[count - 1], atol=1e-2 * np.abs(expected).max(), rtol=0)
    engine.close()


@pytest.mark.slow
def test_no_more_than_an_expert_is_in_memory(tmp_path):
    """A layer of Mixtral 8x7B is 1.4 billion values; a matrix is 1 MB in float32 here, a tensor's 17 MB in int8."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_experts": 64, "num_hidden_layers": 1}
    spec = small_spec(**MIXTURE | shape | {"head_dim": 16})
    built = build_artifact(tmp_path / "a", Recipe(spec, method="dense", format="int8_group32"))
    run(built, tmp_path / "a.gguf")  # whatever is loaded once
    tracemalloc.start()
    try:
        run(built, tmp_path / "a.gguf")
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_a_factor_on_all_frequencies_is_linear_scaling(tmp_path):
    spec = small_spec(**SPEC)
    weights = {"rotary.inv_freq": (0.25 / 50000 ** (np.arange(8) / 8)).astype(np.float32)}
    built = build_artifact(
        tmp_path / "a", Recipe(spec, method="dense"), random_weights(spec, np.random.default_rng(0)) | weights
    )
    facts = facts_of(run(built, tmp_path / "a.gguf").file)
    assert facts["llama.rope.freq_base"] == 50000.0
    assert (facts["llama.rope.scaling.type"], facts["llama.rope.scaling.factor"]) == ("linear", 4.0)


def test_frequencies_that_no_base_gives_become_factors(tmp_path):
    """Llama 3.1's scaling; the factors divide what the base gives."""
    source = load_hf(
        write_model(
            tmp_path / "m",
            num_hidden_layers=1,
            overrides={
                "head_dim": 64,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
        )
    )
    spec = spec_of(source.config)
    weights = roles_of(source, spec)
    built = build_artifact(tmp_path / "a", Recipe(spec, method="dense"), weights)
    record = run(built, tmp_path / "a.gguf")
    facts, factors = facts_of(record.file), tensors_of(record.file)["rope_freqs.weight"].data
    assert facts["llama.rope.freq_base"] == 500000.0
    frequencies = facts["llama.rope.freq_base"] ** (-np.arange(32) / 32) / factors
    np.testing.assert_allclose(frequencies, weights["rotary.inv_freq"], rtol=1e-6)
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(8, rel=1e-6)


@pytest.mark.parametrize(
    ("base", "factor", "context", "width"),
    [
        (10000.0, 40.0, 4096, 64),
        (10000.0, 8.0, 64, 16),
        (123456.0, 3.7, 256, 64),
        (500000.0, 2.0, 32768, 128),
        (1e6, 4.0, 1000000, 32),
    ],
)
def test_yarn_s_settings_give_the_artifact_s_frequencies(base, factor, context, width):
    """transformers makes them from the settings that were found, rotations 32 and 1, as llama.cpp does."""
    from transformers import DeepseekV2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def made(base, factor, context):
        given = {"rope_theta": base, "factor": factor, "original_max_position_embeddings": context}
        config: Any = DeepseekV2Config(rope_parameters={"rope_type": "yarn"} | given)
        config.head_dim = width
        return ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[0].numpy().astype(np.float64)

    found = _llama_cpp.yarn_of(made(base, factor, context))
    assert found is not None
    np.testing.assert_allclose(
        made(found.base, found.factor, found.context_length), made(base, factor, context), rtol=2e-6
    )


def test_frequencies_that_no_settings_of_yarn_give_are_refused(tmp_path):
    """The bounds are 0.4 and 3.6 in the middle of two frequencies, where llama.cpp rounds them."""
    spec = small_spec(**DEEPSEEK)
    plain, ramp = 10000.0 ** (-np.arange(4) / 4), np.clip((np.arange(4) - 0.4) / 3.2, 0, 1)
    weights = {"rotary.inv_freq": (plain * (1 - 0.9 * ramp)).astype(np.float32)}
    built = build_artifact(
        tmp_path / "a", Recipe(spec, method="dense"), random_weights(spec, np.random.default_rng(0)) | weights
    )
    with pytest.raises(ColdpressError, match="'deepseek2' reads no factors for them"):
        run(built, tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_act": "relu"}, "the model's activation is relu, and llama.cpp computes silu"),
        ({"model_type": "opt"}, "cannot hold the architecture 'opt', expected one of arcee, deepseek_v2"),
        ({"rotary_scaling": 1.2}, "rotates whole heads without a factor"),
        (
            {"model_type": "nemotron", "hidden_act": "relu2", "gated_mlp": False},
            "the model's head is its embedding, and llama.cpp's architecture 'nemotron' wants one of its own",
        ),
        (
            MIXTURE | {"model_type": "qwen3_moe", "router_normed": False},
            "'qwen3moe' divides the weights of a token's experts by their sum, and this model leaves them as they are",
        ),
        (
            MIXTURE | {"model_type": "qwen2_moe", "tie_word_embeddings": False},
            "'qwen2moe' leaves them as they are, and this model divides the weights of a token's experts by their sum",
        ),
        (
            MIXTURE | {"model_type": "qwen3_moe", "dense_layers": (0,), "dense_intermediate_size": 32},
            "'qwen3moe' has experts in every layer, and this model has none in layers 0;",
        ),
        (
            MIXTURE | {"model_type": "olmoe", "tie_word_embeddings": False, "qk_norm": "width", "router_normed": False},
            "'olmoe' has as many key heads as attention heads, and this model has 2 of 4",
        ),
        (
            DEEPSEEK | {"norm_eps": 1e-5},
            "one epsilon for all norms, and this model has 1e-06 in those of latents and 1e-05 in others",
        ),
        (
            DEEPSEEK | {"num_hidden_layers": 26, "q_lora_rank": 16},
            "no latents of queries in models of 26 layers, and this model has them, 16 wide",
        ),
        (
            DEEPSEEK | {"num_expert_groups": 2, "num_expert_groups_per_tok": 1, "num_experts": 12},
            "'deepseek2' does not compute this model's num_expert_groups",
        ),
        (DEEPSEEK | {"attention_scale": 0.5}, "divides attention scores by the root of 16, .* multiplies them by 0.5"),
        (DEEPSEEK | {"attention_scale": 0.25, "rotary_scaling": 1.2}, "by 0.25, and cos and sin by 1.2"),
        ({"model_type": "bamboo"}, "cannot hold the architecture 'bamboo', expected one of arcee"),
        (
            MIXTURE | {"model_type": "gpt_oss", "hidden_act": "swiglu_oai"},
            "llama.cpp computes the architecture 'gpt_oss' otherwise: it rounds the bounds of the dimensions",
        ),
        ({"rotary_dim": 8}, "this model rotates 8 of 16 dimensions"),
        ({"attention_scale": 0.5}, "'llama' does not compute this model's attention_scale; it would write other text"),
        ({"model_type": "granite", "logits_softcap": 9.0}, "does not compute this model's logits_softcap"),
        ({"model_type": "smollm3", "layer_rotary": ("none", "main")}, "does not compute this model's layer_rotary"),
        (GEMMA | {"attention_softcap": 9.0}, "'gemma2' does not compute this model's lack of logits_softcap"),
        (GEMMA | {"attention_scale": 0.5}, "'gemma2' does not compute this model's attention_scale"),
        (GEMMA | {"sliding_window": 9}, "'gemma2' does not compute this model's windows in other layers"),
        (
            {"model_type": "stablelm", "norm": "layer_norm", "qk_norm": "heads", "tie_word_embeddings": False},
            "this model's qk_norm.heads",
        ),
        (
            {"model_type": "gpt_neox", "norm": "layer_norm", "gated_mlp": False, "hidden_act": "gelu"},
            "llama.cpp's architecture 'gptneox' wants one of its own",
        ),
        (MIXTURE | {"model_type": "qwen2"}, "llama.cpp's architecture 'qwen2' has no tensor for layers.0.experts.0"),
        (
            MIXTURE | {"num_experts": 1025, "intermediate_size": 16},
            "a layer of the model has 1025 experts, and llama.cpp takes at most 1024",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path, changes, sentence):
    built = build_artifact(tmp_path / "a", Recipe(small_spec(**SPEC | changes), method="dense"))
    with pytest.raises(ColdpressError, match=sentence):
        run(built, tmp_path / "a.gguf")
    assert os.listdir(tmp_path) == ["a"]


def test_no_architecture_that_llama_cpp_has_is_left_out():
    """By the table of the package gguf."""
    known = {name.replace("-", "").replace("_", "") for name in gguf.MODEL_ARCH_NAMES.values()}
    left_out = set(plugins.names("coldpress.compiler.architectures")) - {*_llama_cpp.ARCHITECTURES, *_llama_cpp.REFUSED}
    assert left_out == {"bamboo", "opt"}
    assert not left_out & known


def test_a_tensor_that_llama_cpp_does_not_read_is_refused():
    mistral, qwen = (_llama_cpp.ARCHITECTURES[name] for name in ("mistral", "qwen2"))
    assert _llama_cpp.tensor_name(qwen, "layers.3.q_proj.bias") == "blk.3.attn_q.bias"
    for architecture, role in ((mistral, "layers.3.q_proj.bias"), (qwen, "layers.0.q_norm.weight")):
        with pytest.raises(ColdpressError, match=f"has no tensor for {role}"):
            _llama_cpp.tensor_name(architecture, role)


def test_the_artifact_of_the_record_is_what_is_exported(tmp_path):
    built = build_artifact(tmp_path / "a", Recipe(small_spec(**SPEC), method="dense"))
    package = packaged(built)
    config = ExportConfig(export="gguf", options=IDS_ALONE, file=str(tmp_path / "a.gguf"))
    with (built.path / "flash.img").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises((ColdpressError, ArtifactError), match=r"flash.img: the sha256"):
        export.run(config, package)
    change_manifest(built.path, lambda manifest: manifest["source"].update(name="other"))
    with pytest.raises(ColdpressError, match="run package again"):
        export.run(config, package)
    with pytest.raises(UnknownNameError, match=r"unknown export 'ggml'\. Known: gguf"):
        export.run(config.model_copy(update={"export": "ggml"}), package)
    assert os.listdir(tmp_path) == ["a"]
