"""The ladder: one setting more at each step, the same budget throughout; what loses is shown and left behind."""

import json
from types import SimpleNamespace

import pytest

from runtime import _ladder
from runtime.__main__ import main
from runtime.artifact.reader import open_artifact
from runtime.budget import used_bytes
from runtime.opening import choose_plan


@pytest.fixture
def climbed(relu_artifact):
    """(manifest, plan, the settings of all steps if every step wins)."""
    manifest = open_artifact(relu_artifact.path).manifest
    plan = choose_plan(manifest, None, None, "lfu")
    seen = []

    def measure(setting):
        seen.append(setting)
        return SimpleNamespace(tokens_per_s=float(len(seen)))

    found = _ladder.run(*_ladder.steps(manifest, plan), measure)
    return manifest, plan, dict(zip([step.name for step in found], seen, strict=True))


def test_each_step_has_one_setting_more(climbed):
    _, plan, settings = climbed
    naive, hybrid, selector, cache, collapse, linked, overlap = settings.values()
    assert list(settings) == [
        "naive", "hybrid", "+selector relu", "+cache lfu", "+collapse 4096", "+linked over lfu", "+overlap",
    ]  # fmt: skip
    assert {setting.plan.method for setting in (naive, hybrid)} == {"dense"}
    assert sum(part.num_pinned + part.cache_slots for part in naive.plan.parts) == 0
    assert sum(part.num_pinned for part in hybrid.plan.parts) > 0
    assert sum(part.cache_slots for part in hybrid.plan.parts) == 0
    assert (selector.plan.method, selector.plan.cache, selector.plan.arrays) == ("relu", "static", plan.arrays)
    assert (cache.plan.cache, cache.plan.parts) == ("lfu", plan.parts)
    assert [setting.plan.collapse_gap_bytes for setting in settings.values()] == [0, 0, 0, 0, 4096, 4096, 4096]
    assert linked.plan.cache == "linked"
    assert linked.plan.cache_options == {"linked_over": "lfu"}
    assert collapse.plan == cache.plan.model_copy(update={"collapse_gap_bytes": 4096})
    assert overlap.plan == linked.plan
    assert [setting.flash for setting in settings.values()] == ["serial"] * 6 + ["direct"]


def test_no_step_has_more_dram(climbed):
    manifest, plan, settings = climbed
    for setting in settings.values():
        assert used_bytes(manifest, setting.plan) <= plan.dram_budget_bytes


def test_what_loses_is_shown_and_left_behind():
    settings = iter([10.0, 20.0, 5.0, 40.0])
    before = []

    def change(name):
        def changed(setting):
            before.append(setting)
            return name

        return name, changed

    found = _ladder.run(
        "first", [change("a"), change("b"), change("c")], lambda _: SimpleNamespace(tokens_per_s=next(settings))
    )
    assert before == ["first", "a", "a"]
    assert [(step.name, step.gain, step.total_gain, step.kept) for step in found] == [
        ("naive", 1, 1, True),
        ("a", 2, 2, True),
        ("b", 0.25, 2, False),
        ("c", 2, 4, True),
    ]


def test_bench_prints_the_waterfall(relu_artifact, capsys):
    assert main(["bench", str(relu_artifact.path), "--ladder", "--tokens", "3", "--runs", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["ladder"]
    assert [step["name"] for step in found][:3] == ["naive", "hybrid", "+selector relu"]
    assert found[0]["row"]["hit_rate"] == 0 < found[1]["row"]["hit_rate"]
    assert [step["row"]["selector"] for step in found[:4]] == ["dense", "dense", "relu", "relu"]
    assert any(line.startswith("+overlap") for line in lines)
