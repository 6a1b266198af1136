"""Which experts a token uses and by what weights, held against the routers of transformers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coldpress.runtime.artifact import checks, errors
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.routers import router_of
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_spec

TOKENS, HIDDEN, EXPERTS, CHOSEN = 400, 16, 12, 3
SIGMOID = {"router_scores": "sigmoid", "router_scaling": 2.5}
GROUPS = SIGMOID | {"num_expert_groups": 4, "num_expert_groups_per_tok": 2}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", "MixtralTopKRouter", {}, {}),
    "raw softmax": ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": False}, {"router_normed": False}),
    "normed softmax": ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, {}),
    "bias": ("gpt_oss", "GptOssTopKRouter", {}, {}),
    "sigmoid": ("glm4_moe", "Glm4MoeTopkRouter", {"norm_topk_prob": True}, SIGMOID),
    "raw sigmoid": ("glm4_moe", "Glm4MoeTopkRouter", {"norm_topk_prob": False}, SIGMOID | {"router_normed": False}),
    "groups of a softmax": (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {"topk_method": "group_limited_greedy", "n_group": 6, "topk_group": 3},
        {"router_normed": False, "router_scaling": 2.5, "num_expert_groups": 6, "num_expert_groups_per_tok": 3},
    ),
    "groups": ("glm4_moe", "Glm4MoeTopkRouter", {"norm_topk_prob": True, "n_group": 4, "topk_group": 2}, GROUPS),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_and_weights_are_those_of_transformers(case: str) -> None:
    """For logits of any size whose scores float32 can tell apart."""
    import importlib

    import torch

    kind, name, config, fields = CASES[case]
    given: dict[str, Any] = {"num_experts_per_tok": CHOSEN, "num_local_experts": EXPERTS, "num_experts": EXPERTS}
    given |= {"hidden_size": HIDDEN, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1} | config
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    theirs: Any = getattr(module, name)(SimpleNamespace(**given))
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-3, 0.8 if "router_scores" not in fields else 0.5, TOKENS)[:, None]
    x = scale * torch.randn(TOKENS, HIDDEN, generator=generator)
    with torch.no_grad():
        for values in (*theirs.parameters(), *theirs.buffers()):
            values.copy_(torch.randn(values.shape, generator=generator) * (1 if values.ndim > 1 else 0.1))
        logits, weights, chosen = theirs(x)
    correction = dict(theirs.named_buffers()).get("e_score_correction_bias")
    router = router_of(
        small_spec(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, **fields),
        None if correction is None else correction.numpy(),
    )
    given_logits = logits.numpy() if kind != "mixtral" else (x @ theirs.weight.detach().T).numpy()
    found_chosen = router.choose(router.scores(given_logits))
    expected = np.zeros((TOKENS, EXPERTS), np.float32)
    np.put_along_axis(expected, chosen.numpy(), weights.numpy(), axis=1)
    marked = np.zeros((TOKENS, EXPERTS), bool)
    np.put_along_axis(marked, chosen.numpy(), True, axis=1)
    np.testing.assert_array_equal(found_chosen, marked)
    assert len({tuple(row) for row in marked.tolist()}) > 20
    np.testing.assert_allclose(router.weights(given_logits, found_chosen), expected, rtol=1e-5, atol=1e-7)


def test_the_larger_score_is_taken_and_the_lower_of_equals() -> None:
    logits = np.array([[1, 3, 2, 3], [0, 0, 0, 0], [-200, 5, -200, -200]], np.float32)
    router = router_of(small_spec(num_experts=4, num_experts_per_tok=2))
    chosen = router.choose(router.scores(logits))
    assert chosen.tolist() == [[False, True, False, True], [True, True, False, False], [True, True, False, False]]
    weights = router.weights(logits, chosen)
    np.testing.assert_allclose(weights[:2], [[0, 0.5, 0, 0.5], [0.5, 0.5, 0, 0]])
    np.testing.assert_allclose(weights[2], [0, 1, 0, 0])
    np.testing.assert_allclose(router.weights(logits + np.float32(200), chosen), weights)  # e^203 is beyond float32


def test_experts_that_others_chose_are_weighed_all_the_same() -> None:
    """Also where the largest logit is not among them, and so large that their own exponentials would be 0."""
    router = router_of(small_spec(num_experts=4, num_experts_per_tok=2))
    chosen = np.array([[True, False, True, False]])
    weights = router.weights(np.array([[1, 300, 1, 0]], np.float32), chosen)
    np.testing.assert_allclose(weights, [[0.5, 0, 0.5, 0]])


def test_a_correction_decides_and_does_not_weigh() -> None:
    spec = small_spec(num_experts=3, num_experts_per_tok=2, router_scores="sigmoid", router_normed=False)
    router = router_of(spec, np.array([0, 0, 5], np.float32))
    logits = np.array([[1, 2, -3]], np.float32)
    chosen = router.choose(router.scores(logits))
    assert chosen.tolist() == [[False, True, True]]
    np.testing.assert_allclose(router.weights(logits, chosen), [[0, 1 / (1 + np.exp(-2)), 1 / (1 + np.exp(3))]])


@pytest.mark.parametrize("field", ["router_normed", "router_scaling"])
def test_a_runtime_without_such_a_router_refuses_it(field: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without later fields reads as it always did, and its artifact requires none of these features."""
    value = {"router_normed": False, "router_scaling": 2.0}[field]
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
    plain = build_artifact(tmp_path / "plain", Recipe(spec=small_spec(**mixture), method="dense")).manifest
    assert "router_normed" not in plain.model_dump()["model"]
    assert not [name for name in plain.features.required if name.startswith("model.")]
    built = build_artifact(tmp_path / "a", Recipe(spec=small_spec(**mixture, **{field: value}), method="dense"))
    assert [name for name in built.manifest.features.required if name.startswith("model.")] == [f"model.{field}"]
    assert getattr(open_artifact(built.path).manifest.model, field) == value
    with monkeypatch.context() as patch:
        patch.setattr("coldpress.runtime.artifact.checks.known_features", lambda: tuple(plain.features.required))
        with pytest.raises(errors.FeatureError, match=f"'model.{field}'.*use a newer runtime"):
            open_artifact(built.path)
    change_manifest(built.path, lambda manifest: manifest["features"]["required"].remove(f"model.{field}"))
    with pytest.raises(errors.FeatureError, match=f"a list without model.{field}"):
        open_artifact(built.path)


LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"v_head_dim": 8}, "model.v_head_dim is 8, expected 0 without kv_lora_rank"),
        ({"q_lora_rank": 8}, "model.q_lora_rank is 8, expected 0 without kv_lora_rank"),
        (LATENT | {"v_head_dim": 0}, "v_head_dim is 0, expected a positive size"),
        (LATENT | {"qk_nope_head_dim": 0}, "qk_nope_head_dim is 0, expected a positive size"),
        (LATENT | {"num_key_value_heads": 2}, "num_key_value_heads is 2, expected 1 with kv_lora_rank"),
        (LATENT | {"head_dim": 31}, "head_dim is 31, expected 32, kv_lora_rank and rotary_dim"),
        (LATENT | {"norm": "layer_norm"}, "norm is 'layer_norm', expected rms_norm with kv_lora_rank"),
    ],
)
def test_sizes_of_latents_that_make_no_sense_are_refused(fields: dict[str, Any], expected: str) -> None:
    spec = small_spec(**{"head_dim": 32, **fields})
    with pytest.raises(errors.ModelError, match=expected):
        checks._check_model(spec)
    checks._check_model(small_spec(head_dim=32, **LATENT))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_expert_groups": 5}, "num_expert_groups is 5, expected a divisor of 6 experts"),
        ({"num_expert_groups": 6}, "num_expert_groups is 6, expected groups of at least 2 experts"),
        (
            {"num_expert_groups": 3, "num_expert_groups_per_tok": 4},
            "per_tok is 4, expected at most 3, the number",
        ),
        ({"num_expert_groups": 3, "num_experts_per_tok": 3}, "num_experts_per_tok is 3, expected at most 2, the"),
        ({"num_expert_groups_per_tok": 2}, "num_expert_groups_per_tok is 2, expected at most 1, the number"),
        ({"num_expert_groups": 6, "router_scores": "softmax"}, "num_experts_per_tok is 2, expected at most 1, the"),
    ],
)
def test_groups_that_make_no_sense_are_refused(fields: dict[str, Any], expected: str, tmp_path: Any) -> None:
    shape = {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 96, "router_scores": "sigmoid"}
    build_artifact(tmp_path / "a", Recipe(spec=small_spec(**(shape | fields)), method="dense"))
    with pytest.raises(errors.ModelError, match=expected):
        open_artifact(tmp_path / "a")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"router_scores": "nearest"}, "router_scores is 'nearest', expected one of sigmoid, softmax with its options"),
        ({"router_scores": "../x"}, "router_scores is '../x', expected one of sigmoid, softmax"),
        ({"router_options": {"temperature": 2.0}}, "router_scores is 'softmax', expected one of .* with its options"),
    ],
)
def test_a_router_that_this_runtime_does_not_have_is_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(errors.ModelError, match=expected):
        checks._check_model(small_spec(num_experts=6, num_experts_per_tok=2, **fields))
