"""What is said of a budget that serves a mixture's experts badly, from a curve that was made up."""

import json

import pytest

from coldpress.runtime.artifact.errors import SchemaError
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli.inspect import describe, render
from coldpress.runtime.dram.experts import warning
from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.manifest import EXPERTS_FILE
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_spec

EXPERTS, CHOSEN, UNITS, LAYERS = 6, 2, 6, 11
"""UNITS: blocks of an expert."""
CURVE = ExpertCurve(
    num_experts_per_tok=CHOSEN,
    lru_misses=(1.0, 0.9, 0.88, 0.4, 0.1, 0.0),
    static_misses=(0.9, 0.8, 0.6, 0.5, 0.2, 0.0),
    persistence=0.5,
    predictability=0.8,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    mixture = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "intermediate_size": 32 * UNITS}
    spec = small_spec(num_hidden_layers=LAYERS, hidden_act="silu", **mixture)
    path = tmp_path_factory.mktemp("mixture") / "a.coldpress"
    return build_artifact(path, Recipe(spec=spec, method="dense", context_length=64))


@pytest.fixture(scope="module")
def manifest(built):
    return open_artifact(built.path).manifest


def said(manifest, held, density=CHOSEN / EXPERTS, cache="lru", others=None, step=1.0):
    """Returns the sentence about a plan whose layers hold some experts; a tenth of its budget holds `step` of each
    layer."""
    expert_bytes = [section.num_units // EXPERTS * section.unit_bytes for section in manifest.flash.sections]
    parts = tuple(
        part.model_copy(
            update={
                "density": density,
                "num_pinned": UNITS // 2,
                "cache_slots": round((held if others is None or part.layer != 10 else others) * UNITS) - UNITS // 2,
            }
        )
        for part in manifest.plans[0].parts
    )
    changed = {"parts": parts, "cache": cache, "dram_budget_bytes": round(10 * step * sum(expert_bytes))}
    plan = manifest.plans[0].model_copy(update=changed)
    return warning(CURVE, plan, manifest.model, manifest.flash.sections)


def test_a_layer_without_room_for_a_tokens_experts_is_named(manifest):
    expert_bytes = UNITS * manifest.flash.sections[10].unit_bytes
    words = said(manifest, 2.0, others=1.5)
    assert words.startswith("layer 10 has room for 1.5 of 6 experts, fewer than the 2 of one token")
    assert f"; {expert_bytes // 2} bytes more DRAM" in words
    assert f"; {11 * expert_bytes} bytes more" in said(manifest, 1.0)
    assert said(manifest, 2.0) is None


def test_what_more_dram_saves_is_compared_with_what_the_last_part_saved(manifest):
    """With three experts, one more saves 0.48 and the last saved 0.02; with four 0.3 and 0.48."""
    words = said(manifest, 3.0)
    assert "hit rate would rise by 48 points; the last 10% raised it by 2:" in words
    assert f"10% more DRAM, {sum(s.num_units * s.unit_bytes for s in manifest.flash.sections) / 6:.0f} bytes" in words
    assert said(manifest, 4.0) is None
    assert said(manifest, 6.0) is None
    assert "rise by 24 points; the last 10% raised it by 1:" in said(manifest, 3.0, step=0.5)
    assert said(manifest, 3.0, cache="static") is None
    assert "rise by 30 points; the last 10% raised it by 10:" in said(manifest, 4.0, cache="static")


def test_where_tokens_use_parts_of_experts_nothing_is_said(manifest):
    assert said(manifest, 1.0, density=CHOSEN / EXPERTS / 2) is None


def test_inspect_reads_the_curve_that_an_artifact_carries(built):
    assert describe(open_artifact(built.path))["experts"] is None
    (built.path / EXPERTS_FILE).write_text(CURVE.to_json())

    def few(manifest):
        for part in manifest["plans"][0]["parts"]:
            part.update(density=CHOSEN / EXPERTS, num_pinned=0, cache_slots=UNITS)

    change_manifest(built.path, few, relist=True)
    artifact = open_artifact(built.path)
    summary = describe(artifact)
    assert summary["experts"] == json.loads(CURVE.to_json())
    (words,) = summary["warnings"]
    assert words.startswith("plan '")
    assert "layer 0 has room for 1.0 of 6 experts" in words
    assert words in render(summary, artifact.manifest.model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"lru_misses": [0.5] * 5},
            r"lengths of both curves, and experts of a token is \(5, 6, 2\), expected \(6, 6, 2\)",
        ),
        ({"num_experts_per_tok": 3}, r"is \(6, 6, 3\), expected \(6, 6, 2\)"),
        ({"static_misses": [2.0] * 6}, r"experts.json: 'static_misses.0'"),
        ({"secret": 1}, r"experts.json: 'secret'"),
    ],
)
def test_a_curve_of_something_else_is_refused(built, change, words):
    (built.path / EXPERTS_FILE).write_text(json.dumps(json.loads(CURVE.to_json()) | change))
    change_manifest(built.path, lambda _: None, relist=True)
    with pytest.raises(SchemaError, match=words):
        describe(open_artifact(built.path))
