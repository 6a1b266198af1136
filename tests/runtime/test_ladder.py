"""The ladder: one setting more at each step, the same budget throughout; what loses is shown and left behind."""

import errno
import json
from types import SimpleNamespace

import pytest

from coldpress.cli.main import main
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli import ladder
from coldpress.runtime.dram.budget import used_bytes
from coldpress.runtime.generate.choice import choose_plan
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import small_spec


@pytest.fixture
def climbed(relu_artifact, monkeypatch):
    """(manifest, plan, the settings of all steps if every step wins), on a kernel that has io_uring."""
    monkeypatch.setattr(ladder._native, "ring_error", lambda: 0)
    manifest = open_artifact(relu_artifact.path).manifest
    plan = choose_plan(manifest, None, None, "lfu")
    seen = []

    def measure(setting):
        seen.append(setting)
        return SimpleNamespace(tokens_per_s=float(len(seen)))

    found = ladder.run(*ladder.steps(manifest, plan), measure)
    return manifest, plan, dict(zip([step.name for step in found], seen, strict=True))


def test_each_step_has_one_setting_more(climbed):
    _, plan, settings = climbed
    naive, hybrid, selector, window, collapse, adaptive, cache, linked, overlap, ring = settings.values()
    assert list(settings) == [
        "naive", "hybrid", "+selector relu", "+window", "+collapse 4096", "+collapse adaptive", "+cache lfu",
        "+linked over lfu", "+overlap", "+io_uring",
    ]  # fmt: skip
    assert {setting.plan.method for setting in (naive, hybrid)} == {"dense"}
    assert sum(part.num_pinned + part.cache_slots for part in naive.plan.parts) == 0
    assert sum(part.num_pinned for part in hybrid.plan.parts) > 0
    assert sum(part.cache_slots for part in hybrid.plan.parts) == 0
    assert (selector.plan.method, selector.plan.cache, selector.plan.arrays) == ("relu", "static", plan.arrays)
    assert (window.plan.cache, window.plan.cache_options, window.plan.parts) == ("window", {}, plan.parts)
    assert [setting.plan.collapse_gap_bytes for setting in settings.values()] == [0] * 4 + [4096] * 6
    assert [setting.plan.collapse for setting in settings.values()] == ["static"] * 5 + ["adaptive"] * 5
    assert collapse.plan == window.plan.model_copy(update={"collapse_gap_bytes": 4096})
    assert adaptive.plan == collapse.plan.model_copy(update={"collapse": "adaptive"})
    assert cache.plan == adaptive.plan.model_copy(update={"cache": "lfu"})
    assert linked.plan.cache == "linked"
    assert linked.plan.cache_options == {"linked_over": "lfu"}
    assert overlap.plan == ring.plan == linked.plan
    assert [setting.flash for setting in settings.values()] == ["serial"] * 8 + ["direct", "io_uring"]


def test_io_uring_is_no_step_where_the_kernel_refuses_it(relu_artifact, monkeypatch):
    monkeypatch.setattr(ladder._native, "ring_error", lambda: errno.EPERM)
    manifest = open_artifact(relu_artifact.path).manifest
    _, steps = ladder.steps(manifest, choose_plan(manifest, None))
    assert [name for name, _ in steps][-1] == "+overlap"


def test_what_is_preloaded_is_the_last_step_and_takes_no_more_dram(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder._native, "ring_error", lambda: errno.EPERM)
    path = build_artifact(tmp_path / "predicted", Recipe(method="predictor", spec=small_spec(num_hidden_layers=3))).path
    manifest = open_artifact(path).manifest
    plan = choose_plan(manifest, None, preload="on")
    assert plan.preload_buffer_bytes
    first, steps = ladder.steps(manifest, plan)
    settings = [first]
    for _, change in steps:
        settings.append(change(settings[-1]))
    assert [name for name, _ in steps][-2:] == ["+overlap", "+preload"]
    assert [bool(setting.plan.preload_buffer_bytes) for setting in settings] == [False] * (len(settings) - 1) + [True]
    assert all(used_bytes(manifest, setting.plan) <= plan.dram_budget_bytes for setting in settings)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--batch", "2"),
        ("--kv-cache", "int8"),
        ("--activations", "int8"),
        ("--flash", "io_uring"),
        ("--collapse", "adaptive"),
        ("--preload", "on"),
        ("--device", "device.json"),
    ],
)
def test_what_a_ladder_would_not_heed_is_refused(relu_artifact, capsys, flag, value):
    assert main(["bench", str(relu_artifact.path), "--ladder", flag, value, "--tokens", "1"]) == 2
    assert f"and chooses its settings, and {flag} is {value}; leave {flag} out" in capsys.readouterr().err


def test_a_plan_with_a_window_has_one_step_for_it(relu_artifact):
    manifest = open_artifact(relu_artifact.path).manifest
    plan = choose_plan(manifest, None, None, "window:window_tokens=3")
    first, steps = ladder.steps(manifest, plan)
    changes = dict(steps)
    assert not [name for name in changes if name.startswith("+cache")]
    assert changes["+window"](first).plan.cache_options == {"window_tokens": 3}


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

    found = ladder.run(
        "first", [change("a"), change("b"), change("c")], lambda _: SimpleNamespace(tokens_per_s=next(settings))
    )
    assert before == ["first", "a", "a"]
    assert [(step.name, step.gain, step.total_gain, step.kept) for step in found] == [
        ("naive", 1, 1, True),
        ("a", 2, 2, True),
        ("b", 0.25, 2, False),
        ("c", 2, 4, True),
    ]


def test_what_others_stand_on_is_taken_along_though_it_loses():
    """Reads of chosen units are scattered; what puts them together comes behind."""
    rates = iter([10.0, 4.0, 3.0, 12.0])
    changes = [(name, lambda setting, name=name: f"{setting} {name}") for name in ("+selector topk", "+window", "+x")]
    found = ladder.run("naive", changes, lambda _: SimpleNamespace(tokens_per_s=next(rates)))
    assert [(step.gain, step.total_gain, step.kept) for step in found] == [
        (1, 1, True),
        (0.4, 0.4, True),
        (0.75, 0.4, False),
        (3, 1.2, True),
    ]


def climbed_in_rounds(rates):
    """The step of a ladder whose settings are measured with these speeds, in three rounds."""
    speeds = iter(rates)
    changes = [("+window", lambda setting: f"{setting} +window")]
    measured = []

    def measure(setting):
        measured.append(setting)
        return SimpleNamespace(tokens_per_s=next(speeds))

    _, step = ladder.run("naive", changes, measure, 3)
    assert measured == ["naive", *(["naive", "naive +window"] * 3)]
    return step


def test_a_measured_step_gains_only_beyond_its_noise():
    """The step and the best before it take turns, so that a machine that slows down slows both."""
    noisy = climbed_in_rounds([10.0, 10.0, 13.0, 10.0, 9.0, 10.0, 9.5])
    assert noisy.gain == pytest.approx(1.05)
    assert noisy.gain_error == pytest.approx(0.218 / 3**0.5, rel=0.01)
    assert not noisy.kept
    drifting = climbed_in_rounds([10.0, 10.0, 11.0, 8.0, 8.8, 6.0, 6.6])
    assert drifting.gain == pytest.approx(1.1)
    assert drifting.kept
    assert drifting.row.tokens_per_s == 8.8


@pytest.mark.slow
def test_bench_prints_the_waterfall(relu_artifact, capsys):
    assert main(["bench", str(relu_artifact.path), "--ladder", "--tokens", "3", "--runs", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)["ladder"]
    assert [step["name"] for step in found][:3] == ["naive", "hybrid", "+selector relu"]
    assert found[0]["row"]["hit_rate"] == 0 < found[1]["row"]["hit_rate"]
    assert [step["row"]["selector"] for step in found[:4]] == ["dense", "dense", "relu", "relu"]
    assert any(line.startswith("+overlap") for line in lines)
    assert any(line.startswith("hybrid: the same with as many units pinned") for line in lines)
    assert all(step["gain_error"] > 0 for step in found[1:])
