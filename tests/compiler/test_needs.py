"""Estimates of a build's seconds, held against measured builds, and the limits that clusters get of them; needs that
grow with the work."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coldpress.compiler.checkpoint.shapes import Shapes, read_shapes
from coldpress.compiler.needs import Build, needs_of
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.profiles import device_file
from coldpress.compiler.stage_seconds import PASSES, limit_s, runtime_s
from coldpress.compiler.workflow.settings import of_all_stages, resolve
from coldpress.runtime.device_profiles.devices import read_device

PIXEL6 = read_device(device_file("pixel6", Path()))
WITHIN = 2.0
OPTIONAL = ("importance", "relufy", "distill", "predict", "size", "gram", "export")
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
MISTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINYLLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
QWEN_1_5B = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
MEASURED: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "smollm2": (SMOLLM2, {"ingest": 13, "calibrate": 30, "explore": 16, "allocate": 96}),
    "qwen": (QWEN_1_5B, {"preflight": 79, "calibrate": 50, "explore": 160, "allocate": 695, "verify": 318}),
}


def build_of(folder: Path, shape: Mapping[str, Any], more: tuple[str, ...] = (), **keys: Any) -> Build:
    """A build on two cores."""
    folder.mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 4096, "hidden_act": keys.pop("act", "silu"), **shape}
    (folder / "config.json").write_text(json.dumps(config))
    built = resolve({"model": str(folder), "device": "pixel6", **{key: str(value) for key, value in keys.items()}})
    inputs: dict[str, dict[str, str]] = {
        stage: {}
        for stage in STAGES
        if (stage not in OPTIONAL or stage in more) and (stage != "explore" or built["method"] == "auto")
    }
    shapes: Shapes = read_shapes(folder / "config.json")
    settings = of_all_stages(built)
    tokens = int(settings["tokenize"]["calibration_tokens"])
    return Build(shapes, settings, inputs, PIXEL6, tokens, 256, 2)


def seconds(build: Build) -> dict[str, float]:
    return {stage: runtime_s(stage, build) for stage in build.stages}


def assert_near(found: Mapping[str, float], measured: Mapping[str, float]) -> None:
    """The sum within a factor of WITHIN, and each stage that is a tenth of it within two such factors."""
    total = sum(measured.values())
    assert total / WITHIN <= sum(found[stage] for stage in measured) <= total * WITHIN, found
    for stage, known in measured.items():
        if known > total / 10:
            assert known / WITHIN**2 <= found[stage] <= known * WITHIN**2, (stage, found[stage], known)


def test_real_models(tmp_path: Path) -> None:
    """docs/experiments/builds.md: seconds of stages of two real models, at 60 % of their files."""
    keys: dict[str, Any] = {"context_length": 512, "dram_budget": "90%"}
    for name, (shape, measured) in MEASURED.items():
        assert_near(seconds(build_of(tmp_path / name, shape, **keys)), measured)


def test_predictors_of_four_layers_of_a_7b(tmp_path: Path) -> None:
    """docs/experiments/builds.md: `benchmarks.compile` with predictors and 2,048 calibration tokens."""
    measured = {"ingest": 7.7, "calibrate": 16.4, "quantize": 13.6, "predict": 280, "place": 3.1, "order": 39.7}
    measured |= {"package": 1.7, "verify": 112}
    keys: dict[str, Any] = {"method": "predictor", "calibration_tokens": 2048, "context_length": 512}
    shape = MISTRAL | {"num_hidden_layers": 4}
    build = build_of(tmp_path / "made", shape, ("predict", "size"), act="relu", dram_budget="60%", **keys)
    assert_near(seconds(build), measured)


def test_measuring_everything_takes_much_longer(tmp_path: Path) -> None:
    needed, whole = (seconds(build_of(tmp_path / what, TINYLLAMA, explore=what)) for what in ("needed", "whole"))
    assert needed["explore"] < whole["explore"] / 5
    assert needed["explore"] + needed["allocate"] < (whole["explore"] + whole["allocate"]) * 2 / 3


def test_codes_by_gram_matrices_take_more_of_explore(tmp_path: Path) -> None:
    """The matrices of all layers lie on disk while it runs."""
    plain, corrected = (
        build_of(tmp_path / name, SMALL, more, algorithm=name) for name, more in (("rtn", ()), ("gptq", ("gram",)))
    )
    found = [needs_of("explore", build) for build in (plain, corrected)]
    assert found[1].disk_bytes - found[0].disk_bytes == 8 * 4 * (3 * 256**2 + 768**2)
    assert found[1].ram_bytes - found[0].ram_bytes >= 3 * 4 * 768**2
    assert seconds(corrected)["quantize"] > seconds(plain)["quantize"]


def test_training_takes_as_long_as_it_has_steps(tmp_path: Path) -> None:
    few, many = (
        seconds(build_of(tmp_path / str(steps), SMALL, ("distill",), distill_blocks=2, distill_steps=steps))["distill"]
        for steps in (100, 200)
    )
    update_s = 4 * 2 * 256 * 2 * build_of(tmp_path / "made", SMALL).model.num_parameters / 200e9
    assert many - few == pytest.approx(100 * update_s)


def test_a_whole_7b_takes_hours_not_weeks(tmp_path: Path) -> None:
    found = seconds(build_of(tmp_path / "made", MISTRAL))
    assert 3600 < sum(found.values()) < 12 * 3600
    assert seconds(build_of(tmp_path / "budgets", MISTRAL, dram_budget="60%,40%"))["verify"] > 1.9 * found["verify"]


def test_every_constant_is_one_of_a_stage() -> None:
    assert set(PASSES) <= set(STAGES)


def test_limits_leave_room_for_a_slow_machine() -> None:
    """Cores at a tenth of the speed, and ten minutes to start."""
    assert limit_s(0) == 600
    assert limit_s(30) == 900


@pytest.mark.parametrize("change", [{"num_hidden_layers": 44}, {"intermediate_size": 11264}])
def test_more_work_takes_longer(tmp_path: Path, change: dict[str, int]) -> None:
    usual, more = (
        seconds(build_of(tmp_path / str(number), TINYLLAMA | changes)) for number, changes in enumerate(({}, change))
    )
    assert all(more[stage] >= usual[stage] for stage in usual)
    for stage in ("calibrate", "explore", "verify", "quantize"):
        assert more[stage] > usual[stage], stage
