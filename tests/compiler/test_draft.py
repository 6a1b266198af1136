"""draft: guesses that are right where both models' likeliest tokens are the same; what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages import draft
from coldpress.compiler.stages.draft import DraftConfig, run
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import units_whole_bytes
from coldpress.runtime.simulate import pass_seconds
from coldpress.schemas.errors import ColdpressError
from tests.support.hf import load_hf
from tests.support.records import Build
from tests.support.tiny import tiny_spec

CONFIG = DraftConfig()


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """A model of eleven layers, and the artifacts of a small one and of itself, whole in DRAM."""
    folder = tmp_path_factory.mktemp("draft")
    model = Build(folder / "model", method="dense", format_name="fp16", spec=tiny_spec(num_hidden_layers=11))
    small = Build(
        folder / "small", method="dense", format_name="fp16", spec=tiny_spec(num_hidden_layers=2), budget_share=2.0
    )
    same = Build(folder / "same", method="dense", format_name="fp16", source=model.model, budget_share=2.0)
    return model, small, same


def drafted(model, other, folder):
    return run(CONFIG, model.model, model.corpus, other.corpus, other.package(), Workspace(folder, "f"))


def likeliest(build, blocks):
    """Likeliest next tokens, and their probabilities, by transformers' own model."""
    hf = load_hf(Path(build.model.folder))
    with torch.no_grad():
        probabilities = torch.softmax(hf(torch.from_numpy(blocks.astype(np.int64))).logits.double(), -1)
    return probabilities.argmax(-1).numpy(), probabilities.max(-1).values.numpy()


@pytest.mark.slow
def test_right_guesses_are_those_that_both_models_make(builds, tmp_path):
    model, small, _ = builds
    found = drafted(model, small, tmp_path)
    arrays = load_arrays(found.arrays)
    blocks = load_arrays(model.corpus.split("validation").arrays, "tokens")["tokens"][: len(arrays["right"])]
    expected, _ = likeliest(model, blocks)
    guessed, certainty = likeliest(small, blocks)
    assert (arrays["right"] == (expected == guessed)).mean() > 0.9  # rounding to fp16 turns near ties
    np.testing.assert_allclose(arrays["certainty"], certainty, rtol=0.02)
    assert found.num_tokens == arrays["right"].size >= 64


def test_a_model_guesses_its_own_choices(builds, tmp_path):
    model, _, same = builds
    assert load_arrays(drafted(model, same, tmp_path).arrays)["right"].mean() > 0.97


def test_the_record_says_what_a_guess_costs(builds, tmp_path):
    model, small, _ = builds
    found, artifact = drafted(model, small, tmp_path), open_artifact(small.artifact)
    plan = artifact.manifest.plans[0]
    assert found.dram_bytes == units_whole_bytes(artifact.manifest, plan)
    assert found.token_s == pass_seconds(artifact, plan, 1)[0] > 0


def test_a_draft_model_with_other_token_ids_is_refused(builds, tmp_path):
    model, small, _ = builds
    split = model.corpus.split("validation")
    other = split.model_copy(update={"arrays": split.arrays.model_copy(update={"sha256": "1" * 64})})
    corpus = model.corpus.model_copy(update={"splits": (other,)})
    with pytest.raises(ColdpressError, match="has other token ids than tiny for the same text"):
        run(CONFIG, model.model, model.corpus, corpus, small.package(), Workspace(tmp_path, "f"))


@pytest.mark.parametrize(("theirs", "words"), [({2: "<end>"}, "is '<end>'"), ({}, "is 'no special token'")])
def test_a_draft_model_with_other_special_tokens_is_refused(builds, tmp_path, monkeypatch, theirs, words):
    """Chats would begin and end elsewhere, though the same text has the same ids."""
    model, small, _ = builds
    of = {tmp_path / "tokenizer.json": {2: "<stop>"}, small.artifact / "tokenizer/tokenizer.json": theirs}
    for path, tokens in of.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        added = [
            {
                **{"id": number, "content": text, "special": True, "single_word": False},
                **{"lstrip": False, "rstrip": False, "normalized": False},
            }
            for number, text in tokens.items()
        ]
        vocab = {"a": 0, "b": 1} | {text: number for number, text in tokens.items()}
        path.write_text(
            json.dumps({"added_tokens": added, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}})
        )
    monkeypatch.setattr(draft, "private_folder", lambda model: tmp_path)
    with pytest.raises(ColdpressError, match=f"token 2 {words}, expected the special token '<stop>'"):
        draft._check_same_tokens(model.model, model.corpus, small.corpus, small.artifact)
