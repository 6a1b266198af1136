"""A mixture some of whose layers have one MLP in DRAM instead of experts, and an expert that every token uses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coldpress.runtime.artifact import errors
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.decoder.tokens import Tokens
from coldpress.runtime.generate.session import Session
from coldpress.runtime.store import resident
from coldpress.runtime.trace import FETCH, PRELOAD, Recorder
from coldpress.schemas.manifest import MANIFEST_FILE, RESIDENT_FILE
from coldpress.schemas.model import ModelSpec, role_shape
from tests.support.artifacts import Built, Recipe, build_artifact, change_manifest, small_spec

LAYERS, DENSE, WIDTH, WIDE, SHARED = 11, (0, 1, 6), 64, 160, 96
TOKENS = [3, 14, 15, 92, 65, 35]


def spec_of(**changes: Any) -> ModelSpec:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS}
    own = {"dense_layers": DENSE, "dense_intermediate_size": WIDE, "shared_intermediate_size": SHARED}
    return small_spec(hidden_act="silu", **(shape | own | changes))


@pytest.fixture(scope="module", params=[("neuron",), ("attn_in", "mlp_in", "mlp_mid")], ids="+".join)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    recipe = Recipe(spec=spec_of(), method="dense", context_length=64, families=request.param)
    return build_artifact(tmp_path_factory.mktemp("dense") / "a.coldpress", recipe)


def decoded(session: Session) -> np.ndarray:
    session.decoder.begin(len(TOKENS))
    return np.stack([session.decoder.decode(token) for token in TOKENS])


def test_shapes_follow_the_layer() -> None:
    spec, hidden = spec_of(), spec_of().hidden_size
    expected = {"layers.0.gate_proj": (WIDE, hidden), "layers.2.experts.1.down_proj": (hidden, WIDTH)}
    expected |= {"layers.2.shared_expert.up_proj": (SHARED, hidden), "layers.2.shared_expert_gate": (1, hidden)}
    assert {name: role_shape(spec, f"{name}.weight") for name in expected} == expected


def test_only_layers_with_experts_ask_for_units_of_the_mlp(built: Built) -> None:
    recorder = Recorder()
    decoded(Session(built.path, recorder=recorder))
    asked = {family: [e.layer for e in recorder.events if e.kind == FETCH and e.family == family]
             for family in built.recipe.families or ()}  # fmt: skip
    having = [layer for layer in range(LAYERS) if layer not in DENSE]
    for family, layers in asked.items():
        assert layers == (list(range(LAYERS)) if family == "attn_in" else having) * len(TOKENS)


def test_the_prefill_computes_what_decoding_does(built: Built) -> None:
    whole, decoder = decoded(Session(built.path)), Session(built.path).decoder
    decoder.begin(len(TOKENS))
    together = decoder.prefill(np.array(TOKENS))
    np.testing.assert_allclose(together, whole, rtol=0, atol=2e-3 * np.abs(whole).max())


@pytest.mark.parametrize("name", ["layers.6.down_proj", "layers.3.shared_expert.down_proj"])
def test_every_token_uses_what_is_in_dram(name: str, built: Built, tmp_path: Path) -> None:
    """Without the matrix, the hidden states lose exactly its product with the activation of gate and up."""
    spec, (layer, *above) = built.recipe.spec, name.split(".")[1:-1]
    session = Session(built.path)
    decoder, x = session.decoder, np.random.default_rng(4).normal(size=(3, spec.hidden_size)).astype(np.float32)
    own: Any = decoder._layers[int(layer)].mlp
    mlp = own.shared if above else own
    weights = {role: values.astype(np.float64) for role, values in built.weights.items()}
    gate, up, down = (weights[f"{name.removesuffix('down_proj')}{part}_proj.weight"] for part in ("gate", "up", "down"))
    inner = x @ gate.T
    expected = (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T
    found = mlp.begin(x, Tokens((), None, [slice(0, 3)])).result()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())


def test_tokens_together_have_the_logits_of_each_alone(tmp_path: Path) -> None:
    recipe = Recipe(spec=spec_of(), method="dense", context_length=64, pinned_share=1, slots_share=0)
    path = build_artifact(tmp_path / "a", recipe).path
    decoder = Session(path).decoder
    decoder.begin(len(TOKENS))
    np.testing.assert_array_equal(decoder.decode_many(np.array(TOKENS)), decoded(Session(path)))


def test_preloading_skips_layers_without_units(built: Built) -> None:
    recorder = Recorder()
    session = Session(built.path, preload="on", recorder=recorder)
    expected = decoded(Session(built.path))
    np.testing.assert_allclose(decoded(session), expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    family = next(name for name in built.recipe.families or () if name in ("neuron", "mlp_in"))
    ahead = {event.layer for event in recorder.events if event.kind == PRELOAD and event.family == family}
    assert ahead == {layer for layer in range(LAYERS) if layer not in DENSE} - {2}


def test_a_gate_weights_the_shared_expert(tmp_path: Path) -> None:
    """A gate of 0 gives half of it; one without is the whole."""
    recipe = Recipe(spec=spec_of(), method="dense", format="fp16", context_length=64)
    first = build_artifact(tmp_path / "a", recipe)
    gates = {f"layers.{at}.shared_expert_gate.weight": np.zeros((1, 64), np.float32)
             for at in range(LAYERS) if at not in DENSE}  # fmt: skip
    gated = build_artifact(tmp_path / "b", recipe, {**first.weights, **gates})
    halved = {role: values / 2 if ".shared_expert.down" in role else values for role, values in first.weights.items()}
    half = build_artifact(tmp_path / "c", recipe, halved)
    found, expected = decoded(Session(gated.path)), decoded(Session(half.path))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
    assert np.abs(found - decoded(Session(first.path))).max() > 0.02 * np.abs(expected).max()


def test_all_of_what_every_token_uses_counts(built: Built) -> None:
    manifest = open_artifact(built.path).manifest
    found = resident.computed_bytes(manifest, manifest.plans[0])
    sizes = {role: size for role, (_, size) in resident._sizes(manifest).items()}
    shares = {".experts.": 0.5}
    expected = sum(
        size * next((share for part, share in shares.items() if part in role), 1.0)
        for role, size in sizes.items()
        if role != "embed_tokens.weight" or manifest.model.tie_word_embeddings
    )
    assert sum(found.values()) == pytest.approx(expected + manifest.plans[0].kv_cache_bytes // 2, abs=LAYERS)


def test_a_runtime_without_such_layers_refuses_them(built: Built) -> None:
    fields = {"model.dense_intermediate_size", "model.dense_layers", "model.shared_intermediate_size"}
    assert {name for name in built.manifest.features.required if name.startswith("model.")} == fields


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dense_layers": [1, 0, 6]}, "dense_layers is .*1, 0, 6.*some of 11 layers in order"),
        ({"dense_layers": [0, 1, 11]}, "0, 1, 11.*some of 11 layers in order"),
        ({"dense_layers": list(range(LAYERS))}, "not all of them"),
        ({"dense_intermediate_size": 0}, "dense_intermediate_size is 0, expected"),
        ({"dense_layers": [0, 1]}, "flash.sections.*a list that covers 8 of them|each layer below 11"),
        ({"dense_layers": [0, 1, 6, 7]}, "each layer below 11 that has units"),
        ({"num_experts": 1, "num_experts_per_tok": 1}, "expected 0 and none in a model without experts"),
        ({"shared_intermediate_size": 32}, "shared_expert.down_proj.*expected .64, 32."),
    ],
)
def test_layers_that_contradict_the_artifact_are_refused(
    change: dict[str, Any], expected: str, built: Built, tmp_path: Path
) -> None:
    if built.recipe.families != ("neuron",):
        pytest.skip("one artifact is enough")
    path = build_artifact(tmp_path / "a", built.recipe).path
    change_manifest(path, lambda manifest: manifest["model"].update(change))
    with pytest.raises(errors.ArtifactError, match=expected):
        open_artifact(path)


def test_a_missing_part_of_the_shared_expert_is_refused(tmp_path: Path) -> None:
    path = build_artifact(tmp_path / "a", Recipe(spec=spec_of(), method="dense")).path
    role = "layers.4.shared_expert.up_proj.weight"
    arrays = load_file(path / RESIDENT_FILE)
    del arrays[role]
    save_file(arrays, path / RESIDENT_FILE)

    def without(manifest: dict[str, Any]) -> None:
        manifest["resident"] = [tensor for tensor in manifest["resident"] if tensor["role"] != role]

    change_manifest(path, without)
    assert json.loads((path / MANIFEST_FILE).read_text())["model"]["dense_layers"] == list(DENSE)
    with pytest.raises(errors.ModelError, match=f"a list without {role}"):
        open_artifact(path)
