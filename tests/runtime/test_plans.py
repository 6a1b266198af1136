"""Several plans in one artifact: which one a budget gets, and a change of plan while a text is under way."""

import numpy as np
import pytest

from coldpress.runtime.artifact.errors import DeviceError
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import choose_plan, holds_everything
from coldpress.runtime.generate.session import Session
from coldpress.runtime.store.memory import Memory
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from tests.support.records import Build
from tests.support.stores import Failing
from tests.support.tiny import tiny_spec

PROMPT = [3, 14, 15]
DENSITY, SMALL_DENSITY = 0.25, 0.1


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """Eleven layers; the smaller plan has fewer units a token, and pins fewer of the same."""
    spec = tiny_spec(num_hidden_layers=11)
    build = Build(tmp_path_factory.mktemp("plans"), spec=spec, num_pinned=5, smaller=((0.2, SMALL_DENSITY),))
    build.package()
    return build.artifact


def budgets(artifact):
    return [plan.dram_budget_bytes for plan in open_artifact(artifact).manifest.plans]


def test_each_budget_has_its_own_plan_with_its_own_densities_over_one_image(artifact):
    opened = open_artifact(artifact)
    large, small = opened.manifest.plans
    assert large.dram_budget_bytes > small.dram_budget_bytes
    assert ({part.density for part in large.parts}, {part.density for part in small.parts}) == ({0.25}, {0.1})
    assert sum(part.num_pinned for part in small.parts) <= sum(part.num_pinned for part in large.parts)
    key = large.parts[0].layer, large.parts[0].family
    arrays = [opened.selector_arrays(plan, *key) for plan in (large, small)]
    assert all(found is not None for found in arrays)
    assert any(not np.array_equal(arrays[0][name], arrays[1][name]) for name in arrays[0])
    assert large.name != small.name


def test_the_largest_plan_that_fits_is_taken(artifact):
    manifest = open_artifact(artifact).manifest
    large, small = manifest.plans
    assert choose_plan(manifest).name == large.name
    for asked, expected in ((large.dram_budget_bytes, large), (large.dram_budget_bytes - 1, small)):
        assert choose_plan(manifest, asked).name == expected.name
    assert choose_plan(manifest, large.dram_budget_bytes) == large
    assert choose_plan(manifest, small.dram_budget_bytes) == small


def logits_of(session, tokens):
    """Of each token, decoded one after the other in a new context."""
    session.decoder.begin(len(tokens) + len(PROMPT))
    session.decoder.prefill(np.array(PROMPT))
    return [session.decoder.decode(token) for token in tokens]


def test_after_a_change_tokens_are_those_of_a_fresh_session_under_that_plan(artifact):
    """In both directions; a run that is under way goes on with the other plan's densities."""
    large, small = budgets(artifact)
    tokens = [7, 9, 11, 13]
    expected = {budget: logits_of(Session(artifact, dram_budget_bytes=budget), tokens) for budget in (large, small)}
    assert not np.allclose(expected[large], expected[small], atol=1e-4)
    session = Session(artifact)
    for budget in (small, large, small):
        session.resize(budget)
        assert session.plan.dram_budget_bytes == budget
        assert np.allclose(logits_of(session, tokens), expected[budget], atol=1e-5)
        assert session.store.dram_used_bytes <= budget


def test_a_text_changes_its_plan_at_a_token_boundary(artifact):
    """The first tokens are those of the large plan, the next ones those of a session that decodes the same text under
    the small plan from there."""
    _, small = budgets(artifact)
    session, found = Session(artifact), []
    for token in session.stream(PROMPT, 8, ignore_eos=True):
        found.append(token.id)
        if len(found) == 4:
            session.resize(small)
    fresh, with_large = Session(artifact), Session(artifact).generate(PROMPT, 4, ignore_eos=True).token_ids
    assert tuple(found[:4]) == with_large
    other = Session(artifact, dram_budget_bytes=small)
    # the tokens before the change were decoded with the large plan: its keys and values are what the next ones see
    fresh.decoder.begin(32)
    fresh.decoder.prefill(np.array(PROMPT))
    for token in found[:3]:
        fresh.decoder.decode(token)
    fresh.decoder.selection = other.decoder.selection
    expected = [int(fresh.decoder.decode(token).argmax()) for token in found[3:7]]
    assert found[4:] == expected


def test_a_change_that_fails_leaves_one_whole_plan(artifact, monkeypatch):
    """Without reads, the new plan, whose pinned units are read later; without memory, the former one."""
    large, small = budgets(artifact)
    tokens = [7, 9, 11, 13]
    expected = {budget: logits_of(Session(artifact, dram_budget_bytes=budget), tokens) for budget in (large, small)}
    assert not np.allclose(expected[large], expected[small], atol=1e-3)
    session = Session(artifact, dram_budget_bytes=small)
    session.store._device.flash = failing = Failing(session.store._device.flash, 2)
    with pytest.raises(DeviceError):
        session.resize(large)
    session.store._device.flash = failing.inner
    assert session.plan.dram_budget_bytes == large
    assert np.allclose(logits_of(session, tokens), expected[large], atol=5e-4)
    session.resize(small)
    assert np.allclose(logits_of(session, tokens), expected[small], atol=5e-4)
    allocate, refusals = Memory._allocate, [MemoryError()]

    def refuse_once(memory):
        if refusals:
            raise refusals.pop()
        allocate(memory)

    monkeypatch.setattr(Memory, "_allocate", refuse_once)
    with pytest.raises(DoesNotFitError, match=f"the run goes on with {small} bytes"):
        session.resize(large)
    assert session.plan.dram_budget_bytes == small
    assert np.allclose(logits_of(session, tokens), expected[small], atol=5e-4)
    session.resize(large)
    assert np.allclose(logits_of(session, tokens), expected[large], atol=5e-4)


def test_counters_go_on_through_a_change(artifact):
    large, small = budgets(artifact)
    session, seen = Session(artifact, modelled=True), []
    for token in session.stream(PROMPT, 8, ignore_eos=True):
        seen.append(token)
        session.resize(small if len(seen) % 2 else large)
    metrics = session.store.metrics(7, 0.0, 0.0, 0.0)
    assert metrics.hits + metrics.misses > 0
    assert metrics.modelled_s > 0


def test_a_given_plan_stays(artifact):
    manifest = open_artifact(artifact).manifest
    _, small = budgets(artifact)
    session = Session(artifact, plan=manifest.plans[0])
    session.resize(small)
    assert (session.plan.name, session.plan.dram_budget_bytes) == (manifest.plans[0].name, small)


def test_room_for_everything_is_the_largest_plans(artifact):
    session = Session(artifact)
    session.resize(100 * budgets(artifact)[0])
    manifest = session.artifact.manifest
    assert session.plan.name == manifest.plans[0].name
    assert holds_everything(session.plan, manifest.flash.sections)
    session.close()
    with pytest.raises(ColdpressError, match="this session is closed"):
        session.resize(budgets(artifact)[1])
