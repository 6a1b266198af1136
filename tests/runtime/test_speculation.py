"""Drafts: whatever is proposed, tokens are those of decoding one by one; what it took is counted; who may draft."""

import itertools
import re
from contextlib import contextmanager

import numpy as np
import pytest

from coldpress.runtime.artifact.errors import ArtifactError
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.drafts import Draft, lookup
from coldpress.runtime.drafts.off import nothing
from coldpress.runtime.dram.budget import choose_plan, whole_bytes
from coldpress.runtime.generate.choice import choose_plan as choose_among
from coldpress.runtime.generate.draft_model import DraftModel
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.speculation import Drafts
from coldpress.runtime.generate.statistics import Drafted, drafted
from coldpress.runtime.plugins import load, names
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import Recorder, load_trace
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.layout import Plan
from tests.runtime.test_generate import DECISIONS
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_spec
from tests.support.data import ROOT
from tests.support.hf import load_hf, roles_of, spec_of
from tests.support.stores import open_store

PROMPT = [3, 14, 15, 9, 3, 14]


class Told:
    """A draft that is told what to propose: the tokens of a text, of which every `wrong`-th is another one."""

    def __init__(self, text, wrong=0):
        self.text = [(token + (wrong > 0 and place % wrong == 0)) % 96 for place, token in enumerate(text)]

    @contextmanager
    def drafting(self, context_length):
        yield lambda ids, count: self.text[len(ids) : len(ids) + count]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """A session each, and the same artifact as a draft model."""
    found, folder = {}, tmp_path_factory.mktemp("sessions")
    spec = small_spec(num_hidden_layers=11, intermediate_size=96)
    for method, quantization in (("relu", "fp16"), ("topk", "int4_group32"), ("predictor", "int8_group32")):
        recipe = Recipe(spec=spec, method=method, format=quantization)
        path = build_artifact(folder / method, recipe).path
        found[method] = Session(path), DraftModel(str(path), spec.vocab_size)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu", "topk", "predictor"])
@pytest.mark.parametrize("draft_tokens", [1, 4, 31])
def test_tokens_are_those_without_drafts(sessions, name, draft_tokens):
    session, other = sessions[name]
    plain = session.generate(PROMPT, 16, ignore_eos=True).token_ids
    text = [*PROMPT, *plain]
    for draft in (lookup.Plugin(), Told(text), Told(text, 1), Told(text, 3), other):
        found = session.generate(PROMPT, 16, ignore_eos=True, draft=draft, draft_tokens=draft_tokens)
        assert found.token_ids == plain
        assert other.decoder.length <= len(text)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.5, top_p=0.95, seed=3), Sampling(repetition_penalty=1.4)])
def test_drawn_tokens_are_those_without_drafts(sessions, sampling):
    session, other = sessions["relu"]
    plain = session.generate(PROMPT, 24, sampling=sampling, ignore_eos=True).token_ids
    text = [*PROMPT, *plain]
    for draft in (lookup.Plugin(), Told(text, 3), other):
        assert session.generate(PROMPT, 24, sampling=sampling, ignore_eos=True, draft=draft).token_ids == plain


@pytest.mark.slow
def test_tokens_of_a_trained_model_are_those_without_drafts(tmp_path):
    model = load_hf(ROOT / "demo/model")
    spec = spec_of(model.config)
    recipe = Recipe(spec=spec, method="dense", format="int4_group32", context_length=96, slots_share=0.4)
    session = Session(build_artifact(tmp_path / "a", recipe, roles_of(model, spec)).path)
    prompt = [80, 147, 201, 282, 215, 80, 147]
    plain = session.generate(prompt, 80, ignore_eos=True)
    for count, draft in ((2, lookup.Plugin()), (5, lookup.Plugin()), (7, Told([*prompt, *plain.token_ids]))):
        found = session.generate(prompt, 80, ignore_eos=True, draft=draft, draft_tokens=count)
        assert found.token_ids == plain.token_ids
        assert drafted(found.tokens[1:]).drafted > 0


def test_a_run_ends_where_it_would_without_drafts(sessions):
    """At a token of the caller's choice, and at the end of the text, inside a pass."""
    session, _ = sessions["relu"]
    plain = session.generate(PROMPT, 12, ignore_eos=True)
    draft = Told([*PROMPT, *plain.token_ids])
    steps = session.stream(PROMPT, 12, ignore_eos=True, draft=draft, draft_tokens=5)
    assert [next(steps).id for _ in range(3)] == list(plain.token_ids[:3])
    with pytest.raises(StopIteration) as done:
        steps.send(True)
    assert done.value.value.token_ids == plain.token_ids[:3]
    assert done.value.value.metrics.num_tokens == 2
    spec = session.decoder.spec
    session.decoder.spec = spec.model_copy(update={"eos_token_ids": (plain.token_ids[4],)})
    try:
        expected = session.generate(PROMPT, 12).token_ids
        assert session.generate(PROMPT, 12, draft=draft, draft_tokens=5).token_ids == expected
        assert len(expected) < 12
    finally:
        session.decoder.spec = spec


def test_what_came_of_drafts_is_counted(sessions):
    session, _ = sessions["relu"]
    plain = session.generate(PROMPT, 11, ignore_eos=True)
    text = [*PROMPT, *plain.token_ids]
    right = session.generate(PROMPT, 11, ignore_eos=True, draft=Told(text), draft_tokens=4)
    assert drafted(right.tokens[1:]) == Drafted(passes=2, drafted=8, accepted=8, acceptance=1.0, tokens_per_pass=5.0)
    assert [token.pass_number for token in right.tokens] == [0, *[1] * 5, *[2] * 5]
    assert [token.accepted for token in right.tokens] == [False, *[True, True, True, True, False] * 2]
    wrong = session.generate(PROMPT, 11, ignore_eos=True, draft=Told(text, 1), draft_tokens=4)
    assert drafted(wrong.tokens[1:]) == Drafted(10, 4 * 6 + 3 + 2 + 1, 0, 0.0, 1.0)
    assert drafted(plain.tokens[1:]) == Drafted(10, 0, 0, 0.0, 1.0)
    for run in (right, wrong):
        for name in ("hits", "misses", "reads", "read_bytes"):
            assert sum(getattr(token, name) for token in run.tokens[1:]) == getattr(run.metrics, name), name
        assert run.metrics.num_tokens == 10
    lookups = right.metrics.hits + right.metrics.misses
    assert lookups < plain.metrics.hits + plain.metrics.misses  # what two tokens of a pass use counts once


def test_units_that_are_not_to_be_kept_leave_the_cache_as_it_is(relu_artifact):
    store = open_store(relu_artifact)
    layer, family = 3, "up_down"
    wanted = np.flatnonzero(~store.residency((layer, family)).present)[:20].astype(np.int32)
    codes = relu_artifact.units[layer, family]
    for batch in store.submit((layer, family), wanted, wanted[5:8]):
        assert (batch.rows[batch.slots] == codes[batch.ids]).all()
    present = store.residency((layer, family)).present
    assert np.flatnonzero(present[wanted]).tolist() == [5, 6, 7]


def test_a_run_with_drafts_is_simulated_as_it_was(topk_artifact, tmp_path):
    recorder = Recorder()
    session = Session(topk_artifact.path, recorder=recorder)
    text = [*PROMPT, *Session(topk_artifact.path).generate(PROMPT, 24, ignore_eos=True).token_ids]
    real = session.generate(PROMPT, 24, ignore_eos=True, draft=Told(text, 5), draft_tokens=6)
    recorder.save(tmp_path / "trace")
    trace = load_trace(tmp_path / "trace")
    assert any(event.kept is not None for event in trace)
    artifact = open_artifact(topk_artifact.path)
    replayed = simulate(artifact, choose_plan(artifact.manifest), trace)
    for field in DECISIONS:
        assert getattr(replayed, field) == getattr(real.metrics, field), field


# The plan's draft


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """A dense artifact of eleven layers that reads, whose plan drafts."""
    spec = small_spec(num_hidden_layers=11, intermediate_size=96)
    path = build_artifact(tmp_path_factory.mktemp("drafting") / "a", Recipe(spec=spec, method="dense")).path
    change_manifest(path, lambda manifest: manifest["plans"][0].update(draft="lookup", draft_tokens=3))
    return path


def test_a_run_follows_the_plan_unless_it_is_told_otherwise(drafting):
    with Session(drafting) as session:
        plan = session.plan
        assert (plan.draft, plan.draft_tokens) == ("lookup", 3)
        told = session.generate(PROMPT, 24, ignore_eos=True, draft=load("coldpress.runtime.drafts", Draft, "off"))
        given = session.generate(PROMPT, 24, ignore_eos=True, draft=lookup.Plugin(), draft_tokens=3)
        followed = session.generate(PROMPT, 24, ignore_eos=True)
    assert followed.token_ids == told.token_ids
    assert [token.drafted for token in followed.tokens] == [token.drafted for token in given.tokens]
    assert any(token.drafted for token in followed.tokens)
    assert not any(token.drafted for token in told.tokens)


def test_a_plan_does_not_draft_where_it_saves_nothing(drafting, sessions):
    """With room for the whole model, from the start or after `resize`; and under another selector."""
    manifest = open_artifact(drafting).manifest
    whole = whole_bytes(manifest, manifest.plans[0])
    with Session(drafting, dram_budget_bytes=whole) as roomy, Session(drafting) as resized:
        for session in (roomy, resized):
            session.resize(whole)
            assert not any(token.drafted for token in session.generate(PROMPT, 24, ignore_eos=True).tokens)
    listed = sessions["topk"][0].artifact.manifest
    plan = listed.plans[0].model_copy(update={"draft": "lookup", "draft_tokens": 3})
    listed = listed.model_copy(update={"plans": (plan,)})
    chosen = {name: choose_among(listed, selector=name).draft for name in ("topk", "dense")}
    assert chosen == {"topk": "lookup", "dense": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft": "lookup", "draft_tokens": 0}, "draft_tokens is 0, expected 1 to 31 with a draft"),
        ({"draft": "lookup", "draft_tokens": 32}, "draft_tokens is 32, expected 1 to 31 with a draft"),
        ({"draft_tokens": 2}, "draft_tokens is 2, expected 0 without a draft"),
        ({"draft": "seer", "draft_tokens": 2}, "the draft 'seer'"),
    ],
)
def test_a_plan_whose_draft_contradicts_itself_is_refused(tmp_path, changes, words):
    path = build_artifact(tmp_path / "a", Recipe(spec=small_spec(num_hidden_layers=2), method="dense")).path
    change_manifest(path, lambda manifest: manifest["plans"][0].update(changes))
    with pytest.raises(ArtifactError, match=re.escape(words)):
        open_artifact(path)


def test_a_plan_without_a_draft_does_not_mention_it(drafting):
    plan = open_artifact(drafting).manifest.plans[0]
    assert Plan.model_validate_json(plan.to_json()) == plan
    without = plan.model_copy(update={"draft": None, "draft_tokens": 0})
    assert "draft" not in without.to_json()
    assert Plan.model_validate_json(without.to_json()) == without


# Drafts without a second model


@pytest.mark.parametrize("name", names("coldpress.runtime.drafts"))
def test_a_draft_proposes_at_most_what_is_asked_for(name):
    random = np.random.default_rng(0)
    ids = random.integers(0, 4, 60).tolist()
    with load("coldpress.runtime.drafts", Draft, name).drafting(100, Told(ids)) as propose:
        for length, count in zip(range(1, 60), itertools.cycle((1, 3, 8)), strict=False):
            found = propose(ids[:length], count)
            assert len(found) <= count
            assert all(type(token) is int for token in found)


def test_lookup_gives_what_followed_the_longest_end_last():
    """Against a search through the text."""

    def search(ids, count):
        for length in range(lookup.MOST, lookup.LEAST - 1, -1):
            places = [at for at in range(length, len(ids)) if ids[at - length : at] == ids[-length:]]
            if places and len(ids) > length:
                return ids[places[-1] : places[-1] + count]
        return []

    random = np.random.default_rng(1)
    found_some = 0
    for vocabulary in (2, 5, 30):
        ids = random.integers(0, vocabulary, 80).tolist()
        with lookup.Plugin().drafting(100) as propose:
            for length in sorted({*random.integers(1, 80, 40).tolist(), 80}):
                found = propose(ids[:length], 5)
                assert found == search(ids[:length], 5)
                found_some += bool(found)
    assert found_some > 40


# A selector that sees what is in DRAM


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """An artifact of eleven layers whose selector sees pinned units alone, and whose plan drafts."""
    spec = small_spec(num_hidden_layers=11, intermediate_size=96)
    own = {"options": {"use_read_units": False}, "cache": "static", "slots_share": 0.0, "density": 0.5}
    path = build_artifact(tmp_path_factory.mktemp("seeing") / "a", Recipe(spec=spec, method="flash", **own)).path
    change_manifest(path, lambda manifest: manifest["plans"][0].update(draft="lookup", draft_tokens=3))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, seed=5)])
def test_drafts_of_a_run_that_sees_pinned_units_change_no_token(seeing, sampling):
    """Each token of a pass uses its own units; what several use is read once."""
    off = load("coldpress.runtime.drafts", Draft, "off")
    alone = Session(seeing).generate(PROMPT, 24, ignore_eos=True, draft=off, sampling=sampling)
    told = Told([*PROMPT, *alone.token_ids], 3)
    drafting = Session(seeing).generate(PROMPT, 24, ignore_eos=True, draft=told, draft_tokens=3, sampling=sampling)
    assert drafting.token_ids == alone.token_ids
    found = drafted(drafting.tokens[1:])
    assert 0 < found.accepted < found.drafted
    assert found.tokens_per_pass > 1


def test_a_plan_that_drafts_though_a_token_changes_what_the_next_one_uses_is_refused(tmp_path):
    path = build_artifact(tmp_path / "a", Recipe(spec=small_spec(num_hidden_layers=2), method="flash")).path
    change_manifest(path, lambda manifest: manifest["plans"][0].update(draft="lookup", draft_tokens=2))
    with pytest.raises(ArtifactError, match="none with this flash, which uses what earlier tokens left in DRAM"):
        open_artifact(path)


def test_the_drafts_of_a_plan_stop_where_a_token_would_change_what_the_next_one_uses(seeing):
    with Session(seeing, cache="lru") as session:
        assert not any(token.drafted for token in session.generate(PROMPT, 12, ignore_eos=True).tokens)
        refused(session, lookup.Plugin(), "or the cache 'static'")


def test_drafts_stop_once_a_change_of_budget_lets_tokens_change_others(seeing):
    """As the plan of another budget may, whose cache is another one."""
    with Session(seeing) as session:
        steps = session.stream(PROMPT, 24, ignore_eos=True, draft=Told(range(100)), draft_tokens=3)
        before = [next(steps) for _ in range(8)]
        plan = session.plan.model_copy(update={"cache": "lru"})
        session.decoder.selection = Selection(session.artifact, plan)
        after = [token for token in steps if token.pass_number > before[-1].pass_number]
    assert sum(token.drafted for token in before) > 0
    assert len(after) > 4
    assert not any(token.drafted for token in after)


# Who may draft


def refused(session, draft, words, kind=ColdpressError, **settings):
    with pytest.raises(kind, match=words):
        session.generate(PROMPT, 8, draft=draft, **settings)


def test_drafts_are_refused_where_the_selector_sees_what_is_in_memory(tmp_path):
    built = build_artifact(tmp_path / "a", Recipe(spec=small_spec(num_hidden_layers=2), method="dip_ca"))
    refused(Session(built.path), lookup.Plugin(), "the selector 'dip_ca' uses what is in DRAM")


@pytest.mark.parametrize(("drafted", "accepted", "expected"), [(0, 0, 3), (1, 1, 4), (1, 0, 2), (100, 0, 1)])
def test_how_many_tokens_of_a_pass_will_stand_is_told_by_the_drafts_before(drafted, accepted, expected):
    """One in two drafts as long as none was seen: of four two stand, and the token that was chosen."""
    drafts = Drafts(nothing)
    drafts._drafted, drafts._accepted = drafted, accepted
    assert drafts.num_expected(4) == expected


def test_how_many_drafts_a_pass_takes(sessions):
    for count in (0, 32):
        refused(sessions["relu"][0], lookup.Plugin(), f"is {count}, expected 1 to 31", draft_tokens=count)


def test_a_draft_model_with_a_shorter_context_is_refused(relu_artifact, tmp_path):
    short = build_artifact(tmp_path / "a", Recipe(spec=small_spec(num_hidden_layers=1), context_length=12))
    draft = DraftModel(str(short.path), 96)
    words = "make 14 tokens, the draft model's plan 'test' has a KV cache for 12"
    refused(Session(relu_artifact.path), draft, words, DoesNotFitError)
