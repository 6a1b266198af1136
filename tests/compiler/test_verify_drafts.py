"""verify: what a plan's own draft proposes in a continuation of test text, and what the model accepts of it."""

from contextlib import nullcontext

import numpy as np
import pytest

from coldpress.compiler.stages.verify import VerifyConfig, blocks_of_test_text, decoded, run
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.drafts import Draft
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import drafted
from coldpress.runtime.plugins import load
from tests.support.records import Build
from tests.support.tiny import tiny_spec

SPEC = tiny_spec(num_hidden_layers=3, intermediate_size=480, vocab_size=16)
"""Few words, so that a text soon repeats itself."""
READING = {"method": "dense", "spec": SPEC, "budget_share": 0.02, "num_pinned": 0}


@pytest.fixture(scope="module")
def lookup(tmp_path_factory):
    made = Build(tmp_path_factory.mktemp("lookup"), draft="lookup", **READING)
    made.package()
    return made


def figures_of(build):
    """What `verify` finds of the only plan's drafts."""
    manifest = open_artifact(build.artifact).manifest
    (found,) = decoded.drafts_of_all(str(build.artifact), manifest, blocks_of_test_text(build.corpus, 64)[0])
    return found


def check(build, found, name):
    """Holds the figures against a user's run on this machine's flash."""
    prompt = blocks_of_test_text(build.corpus, 64)[0].tolist()
    count = min(decoded.NEW_TOKENS, 64 - len(prompt))
    with Session(build.artifact) as session:
        written = session.generate(prompt, count, ignore_eos=True)
    counted = drafted(written.tokens[1:])
    assert counted is not None
    assert (found.plan, found.draft, found.same_tokens) == ("default", name, True)
    assert len(found.drafted) == len(found.accepted) == counted.passes
    assert (sum(found.drafted), sum(found.accepted)) == (counted.drafted, counted.accepted)
    assert found.tokens_per_pass == pytest.approx(counted.tokens_per_pass)
    assert 0 < sum(found.accepted) < sum(found.drafted)
    assert all(some <= most for some, most in zip(found.accepted, found.drafted, strict=True))
    assert sum(found.accepted) + len(found.accepted) == count - 1, "all tokens but the first"


@pytest.mark.slow
def test_drafts_are_counted_pass_by_pass(lookup):
    found = run(VerifyConfig(test_tokens=32), lookup.model, lookup.model, lookup.corpus, lookup.package())
    assert len(found.drafts) == 1
    check(lookup, found.drafts[0], "lookup")
    assert found.drafts[0] == figures_of(lookup), "the same each time"


def test_each_pass_has_its_own_accepted_drafts(lookup, monkeypatch):
    """Of a draft that is right once, then wrong, then right twice, and knows no more."""
    block = blocks_of_test_text(lookup.corpus, 64)[0].tolist()
    with Session(lookup.artifact) as session:
        off = load("coldpress.runtime.drafts", Draft, "off")
        text = [*block, *session.generate(block, 12, ignore_eos=True, draft=off).token_ids]
    at, wrong = len(block), (text[len(block) + 3] + 1) % SPEC.vocab_size
    told = {at + 1: [text[at + 1]], at + 3: [wrong], at + 4: text[at + 4 : at + 6]}
    monkeypatch.setattr(type(load("coldpress.runtime.drafts", Draft, "lookup")), "drafting", telling(told))
    monkeypatch.setattr(decoded, "NEW_TOKENS", 12)
    manifest = open_artifact(lookup.artifact).manifest
    plan = manifest.plans[0].model_copy(update={"draft_tokens": 2})
    (found,) = decoded.drafts_of_all(
        str(lookup.artifact), manifest.model_copy(update={"plans": (plan,)}), np.array(block, np.int32)
    )
    assert found.drafted == (1, 1, 2, 0, 0, 0, 0, 0)
    assert found.accepted == (1, 0, 2, 0, 0, 0, 0, 0)


def telling(told):
    """A draft that proposes what it is told for each length of the text."""

    def drafting(self, context_length):
        return nullcontext(lambda ids, count: told.get(len(ids), [])[:count])

    return drafting


def test_other_tokens_than_without_drafts_are_told(lookup, monkeypatch):
    real = decoded._continued

    def other(folder, plan, prompt, draft):
        return real(folder, plan, prompt[:-1] if draft is None else prompt, draft)

    monkeypatch.setattr(decoded, "_continued", other)
    assert not figures_of(lookup).same_tokens


def test_plans_that_do_not_draft_have_no_figures(tmp_path):
    """One has no draft; the other holds everything, so that drafts save nothing."""
    for changes in ({"draft": "off"}, {"draft": "lookup", "budget_share": 1.0}):
        build = Build(tmp_path / changes["draft"], **{**READING, **changes})
        build.package()
        manifest = open_artifact(build.artifact).manifest
        assert decoded.drafts_of_all(str(build.artifact), manifest, blocks_of_test_text(build.corpus, 64)[0]) == ()
