"""Estimates of a build's seconds, held against measured builds, and the limits that clusters get of them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coldpress.compiler.checkpoint.shapes import Shapes, read_shapes
from coldpress.compiler.needs import Build, all_needs, limit_s, needs_of
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.profiles import device_file
from coldpress.compiler.workflow.settings import of_all_stages, resolve
from coldpress.runtime.plugins import names
from coldpress.runtime.profiles.devices import read_device
from coldpress.schemas.preflight import StageNeeds

PIXEL6 = read_device(device_file("pixel6", Path()))
WITHIN = 2.0
OPTIONAL = ("importance", "relufy", "distill", "predict", "size", "gram", "export")
PROSE7M = {
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


def build_of(folder: Path, shape: Mapping[str, Any], more: tuple[str, ...] = (), jobs: int = 1, **keys: Any) -> Build:
    """A build on two cores, whose jobs by layers run so many at a time."""
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
    per_job = math.ceil(shapes.spec.num_hidden_layers / jobs)
    tokens = int(settings["tokenize"]["calibration_tokens"])
    return Build(shapes, settings, inputs, PIXEL6, tokens, 256, 2, layers_per_job=per_job)


def seconds(build: Build) -> dict[str, float]:
    return {needs.stage: needs.runtime_s for needs in all_needs(build)}


def assert_near(found: Mapping[str, float], measured: Mapping[str, float]) -> None:
    """The sum within a factor of WITHIN, and each stage that is a tenth of it within two such factors."""
    total = sum(measured.values())
    assert total / WITHIN <= sum(found[stage] for stage in measured) <= total * WITHIN, found
    for stage, known in measured.items():
        if known > total / 10:
            assert known / WITHIN**2 <= found[stage] <= known * WITHIN**2, (stage, found[stage], known)


def test_four_layers_of_a_7b(tmp_path: Path) -> None:
    """docs/experiments/builds.md: `benchmarks.compile` with predictors and 2,048 calibration tokens; `verify` has an
    entry."""
    measured = {"ingest": 7.7, "calibrate": 16.4, "quantize": 13.6, "predict": 280, "place": 3.1, "order": 39.7}
    measured |= {"package": 1.7, "verify": 112}
    keys: dict[str, Any] = {
        "method": "predictor",
        "calibration_tokens": 2048,
        "context_length": 512,
        "dram_budget": "60%",
    }
    shape = MISTRAL | {"num_hidden_layers": 4}
    build = build_of(tmp_path / "made", shape, ("predict", "size"), act="relu", evaluation_tokens=1024, **keys)
    assert_near(seconds(build), measured)


def test_a_small_real_model(tmp_path: Path) -> None:
    """docs/experiments/builds.md: prose7m with an open method, which took a dense run; all selectors were measured.
    Half of it is the cache in the loop of `explore`."""
    measured = {"ingest": 7.3, "calibrate": 9.9, "explore": 155, "allocate": 14.4, "order": 3.3, "quantize": 6.2}
    measured |= {"verify": 8.4, "report": 1.4}
    keys = {"calibration_tokens": 2048, "evaluation_tokens": 2048, "context_length": 256, "dram_budget": "75%"}
    assert_near(seconds(build_of(tmp_path / "made", PROSE7M, jobs=2, explore="whole", **keys)), measured)


def test_measuring_what_can_still_win_takes_less_than_two_thirds_of_measuring_all(tmp_path: Path) -> None:
    """In all models; `explore` measures formats then, and `allocate` the selectors that can still win."""
    for name, shape in {"7m": PROSE7M, "1b": TINYLLAMA, "7b": MISTRAL}.items():
        needed, whole = (
            seconds(build_of(tmp_path / f"{name}-{what}", shape, explore=what)) for what in ("needed", "whole")
        )
        assert needed["explore"] < whole["explore"] / 5
        assert needed["allocate"] > whole["allocate"]
        assert needed["explore"] + needed["allocate"] < (whole["explore"] + whole["allocate"]) * 2 / 3


def test_codes_by_gram_matrices_take_more_of_explore(tmp_path: Path) -> None:
    """The matrices of all layers lie on disk while it runs, and every pass with other codes corrects them anew."""
    plain, corrected = (
        build_of(tmp_path / name, PROSE7M, more, algorithm=name) for name, more in (("rtn", ()), ("gptq", ("gram",)))
    )
    found = [needs_of("explore", build) for build in (plain, corrected)]
    assert found[1].disk_bytes - found[0].disk_bytes == 8 * 4 * (3 * 256**2 + 768**2)
    assert found[1].ram_bytes - found[0].ram_bytes >= 3 * 4 * 768**2
    passes = len(names("coldpress.runtime.quantization"))
    assert found[1].runtime_s - found[0].runtime_s > (passes - 1e-6) * 8 * corrected.correction_s


def test_two_layers_of_a_1b(tmp_path: Path) -> None:
    """docs/experiments/builds.md: processor seconds of stages on one core, with all selectors measured; those on all
    cores had about one and a half of two."""
    measured = {"ingest": 6.2, "calibrate": 8.5, "explore": 137, "allocate": 59, "recalibrate": 8, "place": 3.3}
    measured |= {"order": 5.3, "quantize": 6.2, "verify": 26, "report": 1.3}
    keys: dict[str, Any] = {
        "calibration_tokens": 1024,
        "evaluation_tokens": 1024,
        "explore": "whole",
        "explore_tokens": 512,
        "context_length": 256,
    }
    shape = TINYLLAMA | {"num_hidden_layers": 2}
    assert_near(seconds(build_of(tmp_path / "made", shape, jobs=2, dram_budget="95%", **keys)), measured)


def test_a_whole_7b_takes_hours_not_weeks(tmp_path: Path) -> None:
    build = build_of(tmp_path / "made", MISTRAL, jobs=2)
    assert 3600 < sum(seconds(build).values()) < 12 * 3600


def test_limits_leave_room_for_a_slow_machine(tmp_path: Path) -> None:
    """Cores at a tenth of the speed, and ten minutes to start: no stage's limit is less than that."""
    build = build_of(tmp_path / "made", MISTRAL)
    slow = Build(**{**vars(build), "flops_per_core": build.flops_per_core / 10})
    for stage in build.stages:
        assert limit_s(needs_of(stage, build)) >= 600 + needs_of(stage, slow).runtime_s
    assert limit_s(StageNeeds(stage="x", ram_bytes=0, disk_bytes=0, runtime_s=30.0)) == 900


@pytest.mark.parametrize("change", [{"num_hidden_layers": 44}, {"intermediate_size": 11264}])
def test_more_work_takes_longer(tmp_path: Path, change: dict[str, int]) -> None:
    usual, more = (
        seconds(build_of(tmp_path / str(number), TINYLLAMA | changes)) for number, changes in enumerate(({}, change))
    )
    assert all(more[stage] >= usual[stage] for stage in usual)
    for stage in ("calibrate", "explore", "verify", "quantize"):
        assert more[stage] > usual[stage], stage
