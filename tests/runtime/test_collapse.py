"""The gap that adapts: it finds the best one, is switched off where it cannot help, and repeats in simulations."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import choose_plan
from coldpress.runtime.flash import direct, simulated
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import simulate
from coldpress.runtime.store import planner
from coldpress.runtime.store.facts import Purpose
from coldpress.runtime.store.gap import AdaptiveGap
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import Recorder
from coldpress.schemas.errors import ColdpressError
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.stores import ask, check_fetch, requests

PAGE, NUM_UNITS = 4096, 4000


def end_token(gap, wanted_bytes, read_bytes, seconds):
    gap.request(SimpleNamespace(wanted_bytes=wanted_bytes))
    gap.ended(Purpose.REQUEST, 1, read_bytes, seconds)
    gap.end_tokens(1, 0)


def decode(gap, seconds_of, num_tokens=600):
    """Seconds of tokens that want a tenth of the units, a page each; `gap` is a number or adapts."""
    random, total = np.random.default_rng(0), []
    for _ in range(num_tokens):
        wanted = np.flatnonzero(random.random(NUM_UNITS) < 0.1)
        now = gap if isinstance(gap, int) else gap.gap_bytes
        plan = planner.plan_reads(planner.Strided(0, PAGE, PAGE), wanted, PAGE, now, 1 << 20)
        seconds = seconds_of(len(plan.extents), plan.extents.num_bytes)
        total.append(seconds)
        if not isinstance(gap, int):
            end_token(gap, wanted.size * PAGE, plan.extents.num_bytes, seconds)
    return sum(total[-300:])


LAWS = {
    "both at once": lambda num_reads, num_bytes: max(num_reads / 2e4, num_bytes / 4e8),
    "one after the other": lambda num_reads, num_bytes: num_reads / 2e4 + num_bytes / 4e8,
}


@functools.cache
def with_each_gap(law):
    return {pages: decode(pages * PAGE, LAWS[law]) for pages in (0, 2, 4, 8, 16, 128)}


@pytest.mark.parametrize("start", [0, PAGE, 16 * PAGE, 32 * PAGE])
@pytest.mark.parametrize("law", LAWS)
def test_it_comes_near_the_best_gap_from_wherever_it_begins(start, law):
    gap = AdaptiveGap(start, PAGE)
    found, by_gap = decode(gap, LAWS[law]), with_each_gap(law)
    assert found < 1.08 * min(by_gap.values())
    assert found < 0.95 * by_gap[0]
    assert found < 0.95 * by_gap[128]
    assert not gap.switched_off


@pytest.mark.parametrize("start", [PAGE, 32 * PAGE])
def test_a_device_bound_by_bandwidth_switches_it_off_and_one_bound_by_operations_on_again(start):
    gap = AdaptiveGap(start, PAGE)
    bound_by_bandwidth = decode(gap, lambda num_reads, num_bytes: num_bytes / 1e8)
    assert gap.switched_off
    assert gap.gap_bytes == 0
    assert bound_by_bandwidth < 1.06 * decode(0, lambda num_reads, num_bytes: num_bytes / 1e8)
    decode(gap, lambda num_reads, num_bytes: max(num_reads / 2e4, num_bytes / 4e9), num_tokens=2000)
    assert not gap.switched_off
    assert gap.gap_bytes > 0


def test_what_takes_no_time_moves_nothing():
    """Where computing hides all reads there is nothing to learn."""
    gap, seen = AdaptiveGap(8 * PAGE, PAGE), []
    for _ in range(400):
        end_token(gap, PAGE, PAGE, 0.0)
        seen.append(gap.gap_bytes)
    assert max(seen, key=seen.count) == 8 * PAGE
    assert not gap.switched_off


def plan_of(artifact):
    return choose_plan(artifact.manifest).model_copy(update={"collapse": "adaptive", "cache": "static"})


@pytest.mark.slow
def test_a_simulation_repeats_and_is_that_of_a_run_on_simulated_flash(relu_artifact):
    artifact, recorder = open_artifact(relu_artifact.path), Recorder()
    plan = plan_of(artifact)
    flash = simulated.Plugin(artifact, plan.queue_depth, data=direct.Plugin(artifact, 8))
    store = Store(artifact, plan, flash, recorder)
    ask(store, relu_artifact, 40)
    found = [simulate(artifact, plan, recorder.events) for _ in range(2)]
    assert found[0].extents_sha256 == found[1].extents_sha256 == store.counters.extents_sha256()
    static = simulate(artifact, plan.model_copy(update={"collapse": "static"}), recorder.events)
    assert static.extents_sha256 != found[0].extents_sha256
    assert (static.hits, static.misses) == (found[0].hits, found[0].misses)


def test_units_arrive_whole_whatever_the_gap(relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    store = Store(artifact, plan_of(artifact), direct.Plugin(artifact, 8))
    for layer, family, ids in requests(relu_artifact, 12):
        check_fetch(store, relu_artifact, layer, family, ids)
        store.end_tokens()


def test_it_can_be_asked_for(relu_artifact):
    with Session(relu_artifact.path, collapse="adaptive") as session:
        assert session.plan.collapse == "adaptive"
    with Session(relu_artifact.path) as session:
        assert session.plan.collapse == "static"


@pytest.mark.slow
def test_measured_seconds_never_choose_units(tmp_path, monkeypatch):
    """Where a token uses what its reads bring, a device of any speed leaves the plan's gap, the units and the text."""
    recipe = Recipe(
        spec=small_spec(num_hidden_layers=3, intermediate_size=1024),
        method="topk",
        options={"use_read_units": True},
        context_length=64,
    )
    path = build_artifact(tmp_path / "a", recipe).path
    plan = plan_of(open_artifact(path)).model_copy(update={"collapse_gap_bytes": PAGE})
    found, real = [], AdaptiveGap.ended
    for seconds in (lambda num_reads, num_bytes: num_bytes / 1e8, lambda num_reads, num_bytes: num_reads / 1e2):

        def ended(gap, purpose, num_reads, num_bytes, waited_s, seconds=seconds):
            real(gap, purpose, num_reads, num_bytes, seconds(num_reads, num_bytes))

        monkeypatch.setattr(AdaptiveGap, "ended", ended)
        with Session(path, plan=plan) as session:
            tokens = session.generate([3, 14, 15], 60, ignore_eos=True).token_ids
            found.append((tokens, session.store.counters.extents_sha256()))
    assert found[0] == found[1]
    with pytest.raises(ColdpressError, match=r"use_read_units.* measured seconds; leave --collapse out"):
        Session(path, collapse="adaptive")
