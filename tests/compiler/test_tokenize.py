"""tokenize: disjoint splits, blocks, and what is refused."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.stages import ingest, tokenize
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.tokenize import TokenizeConfig
from coldpress.compiler.stages.tokenize import text as _text
from coldpress.compiler.stages.tokenize.text import pieces, read_corpus
from coldpress.compiler.workflow.keys import config_keys
from coldpress.schemas.corpus import SPLITS, Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from tests.support.data import data_folder
from tests.support.models import documents, write_corpus, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=1)
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "pages.txt", 200)


def run(model: Model, corpus: Path | str, work: Path, **settings: Any) -> Corpus:
    values = {"calibration_tokens": 512, "evaluation_tokens": 128, "block_tokens": 32} | settings
    return tokenize.run(TokenizeConfig(corpus=str(corpus), **values), model, Workspace(work, "test"))


def tokens_of(corpus: Corpus, split: Any) -> np.ndarray:
    return load_arrays(corpus.split(split).arrays)["tokens"]


def refusal(model: Model, corpus: Path | str, work: Path, **settings: Any) -> str:
    with pytest.raises(ColdpressError) as caught:
        run(model, corpus, work, **settings)
    assert "\n" not in str(caught.value)
    assert str(work.parent) not in str(caught.value) or str(corpus) in str(caught.value)
    return str(caught.value)


def test_blocks_have_the_sizes_asked_for(model: Model, text: Path, tmp_path: Path) -> None:
    corpus = run(model, text, tmp_path)
    assert [(part.split, part.num_blocks, part.block_tokens) for part in corpus.splits] == [
        ("calibration", 16, 32),
        ("validation", 4, 32),
        ("test", 4, 32),
    ]
    for part in corpus.splits:
        tokens = tokens_of(corpus, part.split)
        assert tokens.shape == (part.num_blocks, 32)
        assert tokens.dtype == np.int32
        assert (tokens[:, 0] == model.spec.bos_token_id).all()
        assert not (tokens[:, 1:] == model.spec.bos_token_id).any()
    assert corpus.name == "pages.txt"


def test_blocks_are_consecutive_text(model: Model, text: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model.folder}/tokenizer.json")
    found = tokenizer.decode(tokens_of(run(model, text, tmp_path), "test")[:, 1:].ravel().tolist())
    expected = "\n\n".join(read_corpus(str(text), 0).splits["test"]) + "\n\n"
    assert len(found) > 100
    assert expected.startswith(found)


@pytest.mark.parametrize("add_bos_token", [True, False])
def test_the_tokenizer_decides_about_the_first_token(text: Path, tmp_path: Path, add_bos_token: bool) -> None:
    folder = write_model(tmp_path / "tiny", num_hidden_layers=1, add_bos_token=add_bos_token)
    model = ingest.run(IngestConfig(model=str(folder)), Workspace(tmp_path / "work", "test"))
    starts = tokens_of(run(model, text, tmp_path / "t"), "calibration")[:, 0]
    assert (starts == 0).all() == add_bos_token


def test_a_post_processor_decides_where_the_settings_say_nothing(text: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", num_hidden_layers=1, add_bos_token=False)
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").unlink()
    model = ingest.run(IngestConfig(model=str(folder)), Workspace(tmp_path / "work", "test"))
    assert (tokens_of(run(model, text, tmp_path / "t"), "calibration")[:, 0] == 0).all()


def test_the_same_text_gives_the_same_blocks_wherever_it_lies(model: Model, text: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    copy = tmp_path / "other" / "pages.txt"
    copy.write_text(text.read_text())
    one, two = run(model, text, tmp_path / "a"), run(model, copy, tmp_path / "b")
    assert [part.arrays.sha256 for part in one.splits] == [part.arrays.sha256 for part in two.splits]
    assert one.text_sha256 == two.text_sha256
    assert run(model, text, tmp_path / "c", seed=1).splits[0].arrays.sha256 != one.splits[0].arrays.sha256


def test_a_changed_text_is_tokenized_again(model: Model, tmp_path: Path) -> None:
    first = run(model, write_corpus(tmp_path / "a.txt", 100), tmp_path / "w")
    (tmp_path / "a.txt").write_text("\n\n".join(documents(100)).upper())
    second = run(model, tmp_path / "a.txt", tmp_path / "w")
    assert first.text_sha256 != second.text_sha256
    assert first.splits[0].arrays.sha256 != second.splits[0].arrays.sha256


def test_a_longer_block_than_the_context_is_cut(text: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", num_hidden_layers=1, context=24)
    model = ingest.run(IngestConfig(model=str(folder)), Workspace(tmp_path / "work", "test"))
    assert {part.block_tokens for part in run(model, text, tmp_path / "t", block_tokens=256).splits} == {24}


# --- splits


def test_splits_are_disjoint_and_of_the_right_sizes(text: Path) -> None:
    splits = read_corpus(str(text), 0).splits
    sizes = {split: sum(map(len, splits[split])) for split in SPLITS}
    total = sum(sizes.values())
    assert abs(sizes["calibration"] / total - 0.8) < 0.05
    assert abs(sizes["validation"] / total - 0.1) < 0.05
    pages = [page for split in SPLITS for document in splits[split] for page in document.split("\n\n")]
    assert sorted(page.strip() for page in pages) == sorted(documents(200))


def test_equal_documents_are_in_one_split_only(tmp_path: Path) -> None:
    rows = [json.dumps({"story": page}) for page in documents(50) for _ in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n\n")
    splits = read_corpus(str(tmp_path / "a.jsonl"), 0).splits
    assert sorted(page for split in SPLITS for page in splits[split]) == sorted(documents(50))


def test_test_text_comes_from_the_test_file(tmp_path: Path) -> None:
    pages = documents(100)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/valid.jsonl").write_text("\n".join(json.dumps({"text": page}) for page in pages[:80]))
    (tmp_path / "wiki.test.jsonl").write_text("\n".join(json.dumps({"text": page}) for page in pages[70:]))
    (tmp_path / "README.md").write_text("not text to calibrate on")
    splits = read_corpus(str(tmp_path), 0).splits
    assert set(splits["test"]) == set(pages[70:])
    assert set(splits["calibration"]) | set(splits["validation"]) == set(pages[:70])
    assert len(splits["validation"]) == pytest.approx(70 / 9, abs=3)


@pytest.mark.parametrize("names", [["contest.txt", "latest.txt"], ["test.txt"], ["test.txt", "eval.txt"]])
def test_without_a_part_for_tests_all_is_cut(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        (tmp_path / name).write_text("\n\n".join(documents(100)[number::2]))
    assert all(read_corpus(str(tmp_path), 0).splits.values())


@pytest.mark.parametrize("separator", ["\n\n", "\n", " "])
def test_a_text_is_cut_at_what_it_has(separator: str) -> None:
    words = [f"word{number}" for number in range(4000)]
    found = pieces(separator.join(words))
    assert " ".join(found).split() == words
    assert len(found) > 10
    assert max(map(len, found)) < 2200


@pytest.mark.parametrize("corpus", ["wikitext-2", "tinystories", "tinyshakespeare/input.txt"])
@pytest.mark.needs_data
def test_real_corpora(model: Model, corpus: str, tmp_path: Path) -> None:
    found = run(model, data_folder() / "corpora" / corpus, tmp_path, block_tokens=256, calibration_tokens=2048)
    assert [part.num_blocks for part in found.splits] == [8, 1, 1]


def test_the_text_that_comes_with_python_has_its_own_splits(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coldpress.compiler.stages.tokenize import pydoc as corpus

    pages = {split: documents(90)[index::3] for index, split in enumerate(SPLITS)}
    monkeypatch.setattr(corpus, "documents", pages.__getitem__)
    assert run(model, "pydoc", tmp_path).name == "pydoc"
    assert {split: set(found) for split, found in read_corpus("pydoc", 0).splits.items()} == {
        split: set(found) for split, found in pages.items()
    }


# --- refusals


def test_there_is_no_such_corpus(model: Model, tmp_path: Path) -> None:
    assert "there is no corpus ./nothing.txt; expected pydoc" in refusal(model, "./nothing.txt", tmp_path)


@pytest.mark.parametrize("content", ["", " \n\n \t\n"])
def test_an_empty_corpus(model: Model, tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert refusal(model, tmp_path / "a.txt", tmp_path / "w") == (
        "the corpus a.txt is empty, expected text to calibrate on"
    )


def test_a_folder_without_text(model: Model, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/table.csv").write_text("a,b\n")
    endings = "that ends in .txt, .jsonl, .json (also with .gz or .zst behind it) or .parquet"
    text = refusal(model, tmp_path / "corpus", tmp_path / "w")
    assert text == f"the corpus corpus holds 0 files of text, expected 1 to 1000 files {endings}"
    text = refusal(model, tmp_path / "corpus/table.csv", tmp_path / "w")
    assert text == f"the corpus table.csv is no file of text by its name, expected a name {endings}"


def test_too_little_text_for_one_block(model: Model, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(documents(6)))
    assert refusal(model, tmp_path / "a.txt", tmp_path / "w", block_tokens=128) == (
        "the corpus a.txt is too short: its validation text has less than one block of 128 tokens; give more text or "
        "smaller block_tokens"
    )
    assert "block_tokens" in config_keys(), "which a user can give"


def test_fewer_tokens_than_wanted_are_used_and_said(
    model: Model, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert run(model, text, tmp_path, calibration_tokens=10**6).split("calibration").num_blocks > 16
    assert "blocks of 32 tokens, 31250 wanted" in caplog.text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "a.jsonl:2: the record is not JSON"),
        ("[" * 100_000, "a.jsonl:2: the record is not JSON"),
        ("9" * 5000, "a.jsonl:2: the record is not JSON"),
        ('{"text": 3}', "a.jsonl:2: the field text is a number, expected text or a list of messages"),
        ("[1]", "a.jsonl:2: the record is a list, expected an object with fields of text"),
        ('{"text": "\\ud800"}', "a.jsonl:2: the text holds half a surrogate pair"),
    ],
)
def test_rows_without_text(model: Model, tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    assert expected in refusal(model, tmp_path / "a.jsonl", tmp_path / "w")


def test_text_that_is_no_utf8(model: Model, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"na\xefve")
    assert refusal(model, tmp_path / "a.txt", tmp_path / "w") == "a.txt: the text is not UTF-8 at byte 2; convert it"


def test_blocks_that_leave_nothing_to_predict(model: Model, text: Path, tmp_path: Path) -> None:
    assert "blocks of 2 tokens leave nothing to predict" in refusal(model, text, tmp_path, block_tokens=2)


def test_large_files_are_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_text, "MAX_TEXT_BYTES", 5000)
    write_corpus(tmp_path / "a.txt", 100)
    write_corpus(tmp_path / "b.txt", 100)
    splits = read_corpus(str(tmp_path), 0).splits
    assert 4000 < sum(len(document) for split in SPLITS for document in splits[split]) <= 5000


# --- datasets of the hub


class _Datasets:
    """Stands in for the datasets package: rows are counted as they are fetched."""

    def __init__(self, found: Any) -> None:
        self.found, self.asked, self.fetched = found, [], 0

    def load_dataset(self, *names: Any, **options: Any) -> Any:
        self.asked.append((*names, options))
        if isinstance(self.found, Exception):
            raise self.found
        return {split: self._stream(rows) for split, rows in self.found.items()}

    def _stream(self, rows: Iterable[Any]) -> Iterator[Any]:
        for row in rows:
            self.fetched += 1
            yield row


COMMIT = "0123456789" * 4


def test_a_dataset_with_its_own_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": page} for page in documents(60)]
    package = _Datasets({"train": rows[:40], "validation": rows[40:50], "test": [*rows[50:], rows[0]]})
    monkeypatch.setitem(sys.modules, "datasets", package)
    found = read_corpus("owner/name:subset", 0, COMMIT)
    assert package.asked == [("owner/name", "subset", {"revision": COMMIT, "streaming": True})]
    assert found.name == "owner/name"
    assert set(found.splits["test"]) == {row["text"] for row in [*rows[50:], rows[0]]}
    assert set(found.splits["calibration"]) | set(found.splits["validation"]) == {row["text"] for row in rows[1:50]}


def test_of_a_dataset_no_more_is_fetched_than_is_needed(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"{number} " + "word " * 2000} for number in range(1000)]
    package = _Datasets({"train": iter(rows)})
    monkeypatch.setitem(sys.modules, "datasets", package)
    corpus = run(model, "owner/name", tmp_path, corpus_revision=COMMIT)
    assert {blocks.split for blocks in corpus.splits} == set(SPLITS)
    assert (1 << 20) / 10_000 <= package.fetched <= (1 << 20) / 10_000 + 2


def test_a_dataset_without_a_pinned_revision(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no commit does not come this far (tests/compiler/test_config.py)."""
    package = _Datasets({"train": []})
    monkeypatch.setitem(sys.modules, "datasets", package)
    found = refusal(model, "owner/name:a", tmp_path, corpus_revision=None)
    assert "owner/name:a is a dataset of the hub and needs corpus_revision=<40 hexadecimal digits>" in found
    assert package.asked == []


def test_a_revision_of_a_corpus_that_has_none(model: Model, text: Path, tmp_path: Path) -> None:
    assert "has no meaning for the corpus" in refusal(model, text, tmp_path, corpus_revision=COMMIT)


def test_a_dataset_where_the_network_is_forbidden(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", _Datasets({"train": []}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids the network" in refusal(model, "owner/name", tmp_path, corpus_revision=COMMIT)


def test_a_dataset_that_is_not_reached(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", _Datasets(ConnectionError("no\nroute")))
    assert refusal(model, "owner/name", tmp_path, corpus_revision=COMMIT) == (
        f"the dataset owner/name at revision {COMMIT} cannot be loaded (no route); check the subset and the revision, "
        "or give a local text file instead"
    )


def labelled_rows(path: Path, *tasks: str | None) -> Path:
    """Rows whose words say which task they name; row i of a task has the words of no other row."""
    rows: list[dict[str, Any]] = []
    for number in range(40):
        for place, task in enumerate(tasks):
            row = {"text": " ".join([f"{chr(97 + place % 3)}{number}-{place}"] * 5)}
            rows.append(row if task is None else row | {"task": task})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_each_token_has_the_task_of_its_document(model: Model, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    corpus = run(
        model,
        labelled_rows(tmp_path / "a.jsonl", "zeta", "alpha", None),
        tmp_path / "w",
        evaluation_tokens=20000,
        calibration_tokens=20000,
    )
    tokenizer = Tokenizer.from_file(f"{model.folder}/tokenizer.json")
    part = corpus.split("calibration")
    arrays = load_arrays(part.arrays)
    assert part.tasks == ("alpha", "zeta")
    assert arrays["tasks"].shape == arrays["tokens"].shape
    assert arrays["tasks"].dtype == np.int16
    for task, letter in ((1, "a"), (0, "b"), (-1, "c")):
        words = tokenizer.decode(arrays["tokens"][arrays["tasks"] == task].tolist())
        assert set(words) & set("abc") == {letter}
    assert np.array_equal(arrays["tasks"][:, 0], arrays["tasks"][:, 1])  # <s> goes with what follows
    assert set(corpus.split("test").tasks) <= {"alpha", "zeta"}


def test_without_tasks_there_are_none(model: Model, text: Path, tmp_path: Path) -> None:
    corpus = run(model, text, tmp_path / "1")
    assert [part.tasks for part in corpus.splits] == [(), (), ()]
    assert set(load_arrays(corpus.split("test").arrays)) == {"tokens"}
    many = labelled_rows(tmp_path / "a.jsonl", *(f"{number}" for number in range(30)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize, "MAX_TASKS", 29)
        part = run(model, many, tmp_path / "2", calibration_tokens=50000).split("calibration")
    assert (part.tasks, set(load_arrays(part.arrays))) == ((), {"tokens"})
