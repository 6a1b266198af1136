"""Answers are those of lm-evaluation-harness with transformers, whatever goes through the layers together."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.evaluation import tasks
from benchmarks.evaluation.evaluate import Masks, Sparse
from benchmarks.evaluation.tasks import Item, read_items, right_answers
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.runtime.sparsity import topk
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import num_units
from tests.support.methods import families_of, fit
from tests.support.models import TEXT, write_model

WORDS = TEXT.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_model(folder / "tiny", num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def stream(folder):
    return LayerStream(ingest.run(IngestConfig(model=str(folder / "tiny")), Workspace(folder / "work", "test")), 2)


@pytest.fixture(scope="module")
def encode(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tiny" / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


@pytest.fixture(scope="module")
def items(tmp_path_factory, folder, encode):
    """Questions of many lengths; half of the words to be found are those that the model finds."""
    random = np.random.default_rng(3)

    def text(least, most):
        return " ".join(random.choice(WORDS, int(random.integers(least, most))))

    lines: list[dict[str, Any]] = [
        {"context": text(1, 12), "choices": [text(1, 5) for _ in range(3)], "label": int(random.integers(3))}
        for _ in range(20)
    ]
    tokenizer, model = AutoTokenizer.from_pretrained(folder / "tiny"), harness(folder)
    for number in range(10):
        context = text(2, 9)
        ids = model.model.generate(tokenizer(context, return_tensors="pt").input_ids, max_new_tokens=1, do_sample=False)
        lines.append({"context": context, "target": tokenizer.decode(ids[0, -1:]) if number % 2 else " " + text(1, 3)})
    path = tmp_path_factory.mktemp("task") / "items.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_items(path)


def harness(folder: Path) -> Any:
    model: Any = HFLM
    return model(pretrained=str(folder / "tiny"), device="cpu", dtype="float32", batch_size=1, add_bos_token=False)


@pytest.mark.slow
def test_answers_are_those_of_the_harness(stream, items, encode, folder):
    model, right = harness(folder), []
    for item in items:
        asked = [Instance("loglikelihood", {}, (item.context, choice), 0) for choice in item.choices]
        found = model.loglikelihood(asked, disable_tqdm=True)
        right.append(found[0][1] if len(found) == 1 else int(np.argmax([nll for nll, _ in found])) == item.label)
    assert sum(right[-10:]) >= 3, "some words are found, so that this part of the task says something"
    assert right_answers(stream, items, encode).tolist() == right


@pytest.mark.slow
def test_what_is_scored_together_does_not_matter(stream, items, encode, monkeypatch):
    spec, families = stream.spec, families_of("topk", stream.spec)
    fitted = {(layer, name): fit("topk", num_units(name, spec), 0.02) for layer in range(2) for name in families}
    sparse = Sparse(topk.Plugin(), families, fitted)
    made: list[Masks] = []
    monkeypatch.setattr(tasks, "Masks", lambda *given: made.append(Masks(*given)) or made[-1])
    whole = right_answers(stream, items, encode, sparse).tolist()
    monkeypatch.setattr(tasks, "BATCH_TOKENS", 1)
    assert right_answers(stream, items, encode, sparse).tolist() == whole
    assert len(made) > 20, "each text by itself"
    assert all(masks.used.keys() == fitted.keys() for masks in made), "the selector was at work everywhere"


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"context": "a"}', '{"context": "a", "choices": ["b"], "label": 1}', '{"context": "", "target": "b"}'],
)
def test_a_line_that_is_no_item_is_named(tmp_path, line):
    path = tmp_path / "items.jsonl"
    path.write_text('{"context": "a", "target": " b"}\n' + line + "\n")
    with pytest.raises(ColdpressError, match=r"items\.jsonl:2: no item of a task, expected context with choices"):
        read_items(path)


def test_no_items_and_no_ending_are_refused(tmp_path, stream, encode):
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ColdpressError, match="has no items"):
        read_items(tmp_path / "none.jsonl")
    with pytest.raises(ColdpressError, match="the ending '' of a task is no token"):
        right_answers(stream, [tasks.Item("the", ("",), 0)], encode)


def test_a_blank_at_the_end_of_a_context_is_scored_with_the_ending() -> None:
    """As the harness does."""

    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    item = Item("One and ", ("two", "three"), 0)
    assert tasks._encoded(encode, item, "two") == (encode("One and two"), len("One and"))
