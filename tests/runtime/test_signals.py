"""A selector that sees residency chooses anew from an artifact's signals: by hand, in a full and in an empty cache."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from coldpress.runtime.artifact.byte_planes import pack
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.plugins import load
from coldpress.runtime.signals import decide, load_signals
from coldpress.runtime.simulate import by_signals, simulate
from coldpress.runtime.sparsity import Residency, Selector
from coldpress.runtime.trace import END, FETCH, NO_IDS, Event
from coldpress.schemas.errors import ArtifactError
from coldpress.schemas.families import num_units
from coldpress.schemas.manifest import TRACE_FILE
from tests.support.artifacts import Built, Recipe, build_artifact, change_manifest, small_spec
from tests.support.command_line import run

FAMILIES = {"mlp_in": "mlp_input", "mlp_mid": "mlp_inner"}
NUM_LAYERS, TRACED, NUM_TOKENS = 11, (0, 5, 10), 24
NUM_WARM = NUM_TOKENS // 2
COLD = {"slots_share": 0.0, "pinned_share": 0.0}
WARM = {"slots_share": 0.25, "pinned_share": 0.0}
"""As many slots as a token uses units."""
WEAK, STRONG, DECISIVE = 0.5, 1.0, 5.0
"""STRONG · gamma < WEAK < DECISIVE · gamma, gamma being 0.2."""


def artifact_of(path: Path, recipe: dict[str, Any], tensors: dict[str, np.ndarray] | bytes | None) -> Built:
    """An artifact whose units lie in their own order and deserve DRAM in it, with a trace of `tensors`."""
    spec = small_spec(num_hidden_layers=NUM_LAYERS, hidden_size=64, intermediate_size=128)
    ids = {
        (layer, family): np.arange(num_units(family, spec), dtype=np.int32)
        for layer in range(NUM_LAYERS)
        for family in FAMILIES
    }
    built = build_artifact(path, Recipe(**{"spec": spec, "method": "dip_ca", "order": ids, "rank": ids} | recipe))
    if tensors is not None:
        (path / TRACE_FILE).write_bytes(tensors if isinstance(tensors, bytes) else pack(save(tensors)))
        change_manifest(path, lambda manifest: None, relist=True)
    return built


def signals_of(second: float, num_tokens: int = NUM_TOKENS) -> dict[str, np.ndarray]:
    """Each token has WEAK signals in the first quarter of the units, `second` in the second, and none elsewhere."""
    found: dict[str, np.ndarray] = {}
    for layer in TRACED:
        for signal, units in (("mlp_input", 64), ("mlp_inner", 128)):
            values = np.repeat([WEAK, second, 0.0], [units // 4, units // 4, units // 2])
            found[f"{layer}.{signal}"] = np.tile(values, (num_tokens, 1)).astype(np.float16)
    return found


def decided(path: Path, recipe: dict[str, Any], second: float) -> Any:
    artifact = open_artifact(artifact_of(path, recipe, signals_of(second)).path)
    return decide(artifact, artifact.manifest.plans[0], load_signals(artifact))


def test_an_empty_cache_leaves_the_largest(tmp_path: Path) -> None:
    found = decided(tmp_path / "a", COLD, STRONG)
    assert found.hit_rate == 0
    assert found.reads == NUM_LAYERS * len(FAMILIES), "the second quarter is one read"


def test_blocks_of_a_mixture_are_those_of_the_experts_that_its_signals_show(tmp_path: Path) -> None:
    """Experts 1 and 2 of four, by one neuron of each; two blocks of 32 neurons an expert, all four side by side."""
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    spec = small_spec(num_hidden_layers=NUM_LAYERS, hidden_size=64, **mixture)
    ids = {(layer, "block"): np.arange(8, dtype=np.int32) for layer in range(NUM_LAYERS)}
    inner = np.zeros((NUM_TOKENS, 4 * 64), np.float16)
    inner[:, [127, 128]] = -1
    inputs = np.ones((NUM_TOKENS, 64), np.float16)
    tensors = {
        f"{layer}.mlp_{name}": values for layer in TRACED for name, values in (("inner", inner), ("input", inputs))
    }
    recipe = {"spec": spec, "method": "dense", "order": ids, "rank": ids} | COLD
    artifact = open_artifact(artifact_of(tmp_path / "a", recipe, tensors).path)
    found = decide(artifact, artifact.manifest.plans[0], load_signals(artifact))
    read_bytes = NUM_LAYERS * 4 * artifact.manifest.flash.sections[0].unit_bytes  # whole pages
    assert (found.hit_rate, found.read_bytes) == (0, read_bytes)


def test_what_is_in_dram_is_preferred(tmp_path: Path) -> None:
    """The first quarter deserves DRAM most. While caches warm its signals are weaker, and it is used all the same: then
    tokens that can use nothing else find it there."""
    tensors = signals_of(STRONG)
    for values in tensors.values():
        values[NUM_WARM:, values.shape[1] // 4 :] = 0
    artifact = open_artifact(artifact_of(tmp_path / "a", WARM, tensors).path)
    found = decide(artifact, artifact.manifest.plans[0], load_signals(artifact))
    assert (found.hit_rate, found.reads, found.read_bytes) == (1, 0, 0)


def test_a_replay_of_units_cannot_know_that(tmp_path: Path) -> None:
    """The choices of an empty cache, replayed with a full one: the first token evicts the first quarter."""
    artifact = open_artifact(artifact_of(tmp_path / "a", WARM, signals_of(STRONG)).path)
    trace = []
    for token in range(1, NUM_TOKENS + 1):
        for layer in range(NUM_LAYERS):
            for family, units in (("mlp_in", 64), ("mlp_mid", 128)):
                ids = np.arange(units // 4, units // 2, dtype=np.int32)
                trace.append(Event(FETCH, token, layer, family, ids))
        trace.append(Event(END, token, 0, "mlp_in", NO_IDS))
    assert simulate(artifact, artifact.manifest.plans[0], trace).misses > 0


def test_much_larger_signals_are_read_and_then_stay(tmp_path: Path) -> None:
    """They miss once, before any token counts."""
    found = decided(tmp_path / "a", WARM, DECISIVE)
    assert (found.hit_rate, found.reads) == (1, 0)


def test_tokens_that_take_turns_evict_each_other(tmp_path: Path) -> None:
    """The first quarter is DECISIVE for odd tokens and the second one for even tokens, and DRAM holds only one."""
    tensors = signals_of(DECISIVE)
    for values in tensors.values():
        values[1::2] = np.roll(values[1::2], values.shape[1] // -4, axis=1)
        values[1::2, -values.shape[1] // 4 :] = 0
    artifact = open_artifact(artifact_of(tmp_path / "a", WARM, tensors).path)
    found = decide(artifact, artifact.manifest.plans[0], load_signals(artifact))
    assert (found.hit_rate, found.reads) == (0, NUM_LAYERS * len(FAMILIES))


def test_only_experts_that_a_token_uses_count() -> None:
    """Of two experts with two units each; the first token uses the second one, whose signals are weaker."""
    key, selector = (0, "mlp_mid"), load("coldpress.runtime.sparsity", Selector, "dip_ca")
    arrays = {"num_selected": np.array([4], np.int32), "gamma": np.array([0.2], np.float32)}
    signals, experts = np.array([[4, 3, 2, 1]] * 2, np.float16), np.array([[False, True], [True, True]])
    choose = by_signals(selector, {key: arrays}, {key: signals}, {key: experts})
    nowhere = Residency(np.zeros(4, bool), np.arange(4, dtype=np.int32))
    assert choose(key, 0, nowhere).tolist() == [2, 3]
    assert choose(key, 1, nowhere).tolist() == [0, 1, 2, 3]


def test_the_command_gives_the_figures_of_a_budget_and_a_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built = artifact_of(tmp_path / "a.coldpress", WARM, signals_of(STRONG))
    budget = built.manifest.plans[0].dram_budget_bytes
    slots_bytes = 16 * built.units[0, "mlp_in"].shape[1] + 32 * built.units[0, "mlp_mid"].shape[1]
    seconds = []
    for room in (budget, budget - (NUM_LAYERS - 1) * slots_bytes):
        for cache in ("lru", "lfu"):
            told = ("simulate", built.path, "--signals", "--cache", cache, "--dram-budget", room)
            code, out, err = run(capsys, *told, "--json")
            assert (code, err) == (0, "")
            found = json.loads(out)["per_token"]
            assert (found["hit_rate"] == 1) == (room == budget)
            assert f"{found['hit_rate']:.3f}" in run(capsys, *told)[1]
            seconds.append(found["token_s"])
    assert 0 < seconds[0] < seconds[2]


def test_a_recorded_trace_says_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built, trace = artifact_of(tmp_path / "a.coldpress", WARM, None), tmp_path / "run.trace"
    options = ("--prompt-ids", "3,4", "--max-new-tokens", "3", "--ignore-eos", "--trace", trace)
    assert run(capsys, "generate", built.path, *options)[0] == 0
    assert "an artifact of method=auto could choose anew" in run(capsys, "simulate", built.path, "--trace", trace)[1]
    carrying = artifact_of(tmp_path / "b.coldpress", WARM, signals_of(STRONG))
    assert "with --signals it chooses anew" in run(capsys, "simulate", carrying.path, "--trace", trace)[1]


@pytest.mark.parametrize(
    ("tensors", "options", "sentence"),
    [
        (None, (), "has no trace.safetensors.zst, from which its selector could choose anew"),
        (b"no", (), "what cannot be read"),
        ({"0.mlp_input": np.ones((9, 64), np.float16)}, (), "has no layer with all of mlp_input, mlp_inner"),
        (signals_of(STRONG, 1), (), "of two tokens at least"),
        (signals_of(np.inf), (), "not finite"),
        (signals_of(STRONG) | {"0.mlp_input": np.array(1, np.float16)}, (), "float16 []"),
        (signals_of(STRONG) | {"5.mlp_inner": np.ones((9, 64), np.float16)}, (), "float16 [9, 64], expected float16"),
        (signals_of(STRONG), ("--cache", "belady"), "must know all requests to come"),
        (signals_of(STRONG), ("--preload", "on"), "add --preload off"),
    ],
)
def test_what_cannot_be_decided_is_refused(tmp_path: Path, capsys, tensors, options, sentence) -> None:
    built = artifact_of(tmp_path / "a.coldpress", WARM, tensors)
    code, out, err = run(capsys, "simulate", built.path, "--signals", *options)
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_a_bound_holds_before_anything_is_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldpress.runtime.signals.MAX_BYTES", 10_000)
    artifact = open_artifact(artifact_of(tmp_path / "a", WARM, signals_of(STRONG)).path)
    with pytest.raises(ArtifactError, match="bytes before compression, expected 10000 at most"):
        load_signals(artifact)
