"""The draft model inside an artifact: the same tokens, one DRAM budget, modelled seconds, and what is refused."""

import json
import math

import numpy as np
import pytest

from coldpress.runtime.artifact.errors import ArtifactError
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.drafts import Draft
from coldpress.runtime.dram.budget import refit, used_bytes, whole_bytes
from coldpress.runtime.generate.draft_model import DraftModel
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import drafted
from coldpress.runtime.model import Model
from coldpress.runtime.plugins import load
from coldpress.schemas.errors import ColdpressError
from tests.support.artifacts import Recipe, add_draft_model, build_artifact, change_manifest, small_spec

PROMPT = [3, 14, 15, 9, 26, 5]
OFF = load("coldpress.runtime.drafts", Draft, "off")


def dense(folder, num_layers, seed=0, **shape):
    spec = small_spec(num_hidden_layers=num_layers, **{"intermediate_size": 768, **shape})
    own = {"cache": "static", "slots_share": 0.0, "pinned_share": 0.25, "context_length": 64}
    return build_artifact(folder, Recipe(spec=spec, method="dense", seed=seed, **own)).path


def small(folder):
    return dense(folder, 2, seed=1, intermediate_size=96)


def opened(path):
    """A session of the plan as it is: a model that drafts for itself takes DRAM in which all of it would fit."""
    return Session(path, plan=open_artifact(path).manifest.plans[0])


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Artifacts of eleven layers whose draft model is their own copy, or another model; and the bytes of its DRAM."""
    folder, found = tmp_path_factory.mktemp("drafts"), {}
    for name, draft in (("own", dense(folder / "same", 11)), ("other", small(folder / "small"))):
        path = dense(folder / name, 11)
        found[name] = path, add_draft_model(path, draft)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.2, seed=4), Sampling(repetition_penalty=1.3)])
@pytest.mark.parametrize("name", ["own", "other"])
def test_tokens_are_those_without_drafts(artifacts, name, sampling):
    path, _ = artifacts[name]
    with opened(path) as session:
        alone = session.generate(PROMPT, 24, ignore_eos=True, draft=OFF, sampling=sampling)
        found = session.generate(PROMPT, 24, ignore_eos=True, sampling=sampling)
    assert found.token_ids == alone.token_ids
    assert drafted(found.tokens[1:]).drafted > 0


def test_a_model_guesses_all_of_its_own_tokens(artifacts):
    with opened(artifacts["own"][0]) as session:
        found = session.generate(PROMPT, 21, ignore_eos=True)
        assert drafted(found.tokens[1:]).acceptance == 1
        assert drafted(found.tokens[1:]).tokens_per_pass == 5
        reads = session.generate(PROMPT, 21, ignore_eos=True, draft=OFF).metrics.read_bytes
    assert found.metrics.read_bytes < reads / 3


def test_drafts_end_where_the_plan_finds_them_too_unsure(tmp_path):
    """With a certainty of 1 the model proposes one token; where the text repeats itself, others follow."""
    found = {}
    for certainty in (0.0, 1.0):
        path = dense(tmp_path / f"{certainty}", 11)
        add_draft_model(path, small(tmp_path / f"small{certainty}"), draft_tokens=8, certainty=certainty)
        with Session(path) as session:
            tokens = session.generate(PROMPT, 16, ignore_eos=True).tokens[1:-1]
        found[certainty] = [token.drafted for token in tokens if token.leads]
    assert 8 in found[0.0]
    assert found[1.0].count(1) > len(found[1.0]) / 2


def guessed(path, ids, count):
    """Recomputes from the logits of a session: the likeliest tokens, and the products of their probabilities."""
    tokens, sure = [], []
    with Session(path) as session:
        session.decoder.begin(32)
        logits = session.decoder.prefill_last(np.array(ids))
        for _ in range(count):
            tokens.append(int(np.argmax(logits)))
            weights = np.exp(logits.astype(np.longdouble))
            sure.append(float(weights.max() / weights.sum()) * (sure[-1] if sure else 1.0))
            logits = session.decoder.decode(tokens[-1])
    return tokens, sure


def test_how_sure_a_draft_is_follows_from_the_probabilities_of_the_model(tmp_path):
    """Drafts go on while the product of probabilities reaches the least."""
    path = small(tmp_path / "a")
    expected, sure = guessed(path, PROMPT, 6)
    model = DraftModel(str(path), 96, certainty=math.sqrt(sure[2] * sure[3]))  # below it after the fourth
    with model.drafting(32) as propose:
        assert propose(PROMPT, 6) == expected[:4]


@pytest.mark.parametrize("accepts", [True, False])
def test_accepted_drafts_make_later_ones_surer_and_others_less(tmp_path, accepts):
    path = small(tmp_path / "a")
    (draft,), (sure,) = guessed(path, PROMPT, 1)
    ids = [*PROMPT, draft, 7] if accepts else [*PROMPT, (draft + 1) % 96, 7]
    expected, later = guessed(path, ids, 4)
    ratio = (1 + accepts) / (1 + sure)
    model = DraftModel(
        str(path), 96, certainty=math.sqrt(ratio) * later[0]
    )  # the first pass decides whether there is a second draft
    with model.drafting(32) as propose:
        assert propose(PROMPT, 1) == [draft]
        found = propose(ids, 4)
    assert found == expected[: len(found)]
    assert (len(found) > 1) == accepts


def test_the_draft_model_counts_in_the_one_budget(artifacts):
    path, needed = artifacts["other"]
    manifest = open_artifact(path).manifest
    plan = manifest.plans[0]
    without = plan.model_copy(update={"draft": None, "draft_tokens": 0, "draft_bytes": 0})
    assert used_bytes(manifest, plan) == used_bytes(manifest, without) + needed
    assert whole_bytes(manifest, plan) == whole_bytes(manifest, without)
    with Session(path) as session:
        assert session.store.dram_used_bytes == used_bytes(manifest, plan)
        assert session._draft_model is not None
        assert session._draft_model._store.dram_used_bytes == needed


def test_with_room_for_the_whole_model_nothing_is_drafted(artifacts):
    path, _ = artifacts["other"]
    manifest = open_artifact(path).manifest
    whole = whole_bytes(manifest, manifest.plans[0])
    assert refit(manifest, manifest.plans[0], whole).draft_bytes == 0
    with Session(path, dram_budget_bytes=whole) as session:
        assert not any(token.drafted for token in session.generate(PROMPT, 8, ignore_eos=True).tokens)
        assert session._draft_model is None
        session.resize(manifest.plans[0].dram_budget_bytes)
        assert any(token.drafted for token in session.generate(PROMPT, 8, ignore_eos=True).tokens)
        session.resize(whole)
        assert session._draft_model is None


def test_a_change_of_budget_during_a_run_frees_the_draft_model(artifacts):
    path, _ = artifacts["other"]
    manifest = open_artifact(path).manifest
    with Session(path) as session:
        expected = session.generate(PROMPT, 24, ignore_eos=True).token_ids
        steps = session.stream(PROMPT, 24, ignore_eos=True)
        before = [next(steps) for _ in range(6)]
        session.resize(whole_bytes(manifest, manifest.plans[0]))
        after = list(steps)
        assert session._draft_model is None
    assert tuple(token.id for token in (*before, *after)) == expected
    assert any(token.drafted for token in before)


def test_python_tells_how_many_drafts_were_right(artifacts):
    with Model(artifacts["other"][0]) as model:
        assert (model.stats.drafted_tokens, model.stats.accepted_tokens) == (0, 0)
        model.generate(PROMPT, 16)
        drafts = model.stats
    with Session(artifacts["other"][0]) as session:
        found = drafted(session.generate(PROMPT, 16).tokens[1:])
    assert (drafts.drafted_tokens, drafts.accepted_tokens) == (found.drafted, found.accepted)
    assert drafts.drafted_tokens > 0


def test_its_seconds_on_the_device_are_counted(artifacts):
    """Every token costs the draft model a pass; the larger one's passes are the same as those of told drafts."""
    with Session(artifacts["other"][0], flash="simulated") as session:
        found = session.generate(PROMPT, 16, ignore_eos=True)
        drafting_s = session._draft_model.modelled_s()
        alone = session.store.metrics(15, 0.0, 0.0, 0.0, drafted(found.tokens[1:]).passes).modelled_s
    assert drafting_s > 0
    assert found.metrics.modelled_s == pytest.approx(alone + drafting_s)


def test_tokens_that_the_larger_model_does_not_have_are_never_proposed(tmp_path):
    """Models of one family pad their vocabularies to other sizes."""
    draft = small(tmp_path / "small")
    with DraftModel(str(draft), 8).drafting(64) as propose:
        assert max(propose(PROMPT, 31)) < 8


def test_its_files_are_those_of_the_artifact(artifacts, tmp_path):
    path, _ = artifacts["other"]
    artifact = open_artifact(path)
    paths = [entry.path for entry in artifact.manifest.files]
    assert {"draft/manifest.json", "draft/flash.img", "draft/resident.safetensors"} <= {*paths}
    assert verify_artifact(artifact) == sum(entry.size_bytes for entry in artifact.manifest.files)


def test_another_draft_model_in_its_place_is_refused(tmp_path):
    path = dense(tmp_path / "a", 11)
    add_draft_model(path, small(tmp_path / "small"))
    listed = next(e for e in open_artifact(path).manifest.files if e.path == "draft/manifest.json")
    change_manifest(path / "draft", lambda manifest: manifest["source"].update(name="tesx"))
    assert (path / "draft/manifest.json").stat().st_size == listed.size_bytes
    with pytest.raises(ArtifactError, match="the artifact's identity"):
        Session(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_bytes": 0}, "more than 0 with the draft model"),
        ({"draft": "lookup"}, "0 without a draft model"),
    ],
)
def test_a_plan_whose_draft_and_dram_do_not_go_together_is_refused(tmp_path, changes, words):
    path = dense(tmp_path / "a", 2)
    add_draft_model(path, small(tmp_path / "small"))
    change_manifest(path, lambda manifest: manifest["plans"][0].update(changes))
    with pytest.raises(ArtifactError, match=words):
        open_artifact(path)


def test_a_plan_that_needs_a_draft_model_which_is_not_there_is_refused(tmp_path):
    path = dense(tmp_path / "a", 2)
    needed = {"draft": "model", "draft_tokens": 4, "draft_bytes": 1}
    change_manifest(path, lambda manifest: manifest["plans"][0].update(needed))
    with pytest.raises(ArtifactError, match=r"there is no draft/manifest\.json"):
        open_artifact(path)


def test_a_draft_model_is_asked_for_where_no_plan_has_dram_for_it(tmp_path):
    path = dense(tmp_path / "a", 2)
    with Session(path) as session, pytest.raises(ColdpressError, match="has no DRAM for one; use --draft lookup"):
        session.generate(PROMPT, 4, draft=load("coldpress.runtime.drafts", Draft, "model"))


def test_plans_without_a_draft_model_read_as_they_always_did(tmp_path):
    path = dense(tmp_path / "a", 2)
    (plan,) = json.loads((path / "manifest.json").read_text())["plans"]
    assert not {"draft_bytes", "draft_certainty"} & plan.keys()
