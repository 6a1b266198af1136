"""tokenize: corpora as people have them: layouts of records, packed files, and what is refused of them."""

import gzip
import json
import logging
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from coldpress.compiler.stages.tokenize import files
from coldpress.compiler.stages.tokenize import text as _text
from coldpress.compiler.stages.tokenize.files import parquet_records, read_text
from coldpress.compiler.stages.tokenize.rows import TextRows
from coldpress.compiler.stages.tokenize.text import read_corpus
from coldpress.schemas.corpus import SPLITS
from coldpress.schemas.errors import ColdpressError
from tests.support.models import documents

PAGES = documents(40)


def jsonl(rows: list[Any]) -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode("utf-8", "surrogatepass")


def found(path: Path, fields: str = "") -> list[str]:
    """All documents of a corpus, sorted."""
    splits = read_corpus(str(path), 0, rows=TextRows(tuple(filter(None, fields.split("+"))))).splits
    return sorted(text for split in SPLITS for text in splits[split])


def refusal(path: Path, fields: str = "") -> str:
    with pytest.raises(ColdpressError) as caught:
        found(path, fields)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


# --- layouts


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "a", "title": "t"}, "a"),
        ({"story": "a", "messages": 3}, "a"),
        ({"instruction": "do", "input": "this", "output": "done"}, "do\n\nthis\n\ndone"),
        ({"output": "done", "instruction": "do", "input": ""}, "do\n\ndone"),
        ({"instruction": "do", "output": "done", "input": None}, "do\n\ndone"),
        ({"instruction": "do", "output": "done"}, "do\n\ndone"),
        ({"instruction": "do", "context": "there", "response": "done"}, "do\n\nthere\n\ndone"),
        ({"prompt": "to", "completion": "be"}, "to\n\nbe"),
        ({"prompt": "to", "response": "be"}, "to\n\nbe"),
        ({"question": "2 + 2?", "answer": "#### 4"}, "2 + 2?\n\n#### 4"),
        ("a text by itself", "a text by itself"),
    ],
)
def test_known_layouts(row: Any, text: str) -> None:
    assert TextRows().text("a:1", row) == text


def test_a_key_names_the_field_or_several() -> None:
    row = {"text": "not this", "body": "this", "abstract": "before"}
    assert TextRows(("body",)).text("a:1", row) == "this"
    assert TextRows(("abstract", "body")).text("a:1", row) == "before\n\nthis"


def test_layouts_may_be_mixed_and_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows = [{"text": page} for page in PAGES[:30]] + [{"question": page, "answer": "so"} for page in PAGES[30:]]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    assert found(tmp_path / "a.jsonl") == sorted(PAGES[:30] + [f"{page}\n\nso" for page in PAGES[30:]])
    assert "a.jsonl: 30 records were read as text" in caplog.text
    assert "a.jsonl: 10 records were read as question+answer" in caplog.text


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        (
            {"title": "x", "body": "y"},
            "",
            "a.jsonl:41: no field of the record is known to hold text, found 'title, body'; name the field "
            "with corpus_field=<field>, or several with corpus_field=<one>+<another>",
        ),
        ({"instruction": "x"}, "", "found 'instruction'; name the field with corpus_field"),
        ({}, "", "found 'none'"),
        ({f"field{i}": 0 for i in range(1000)}, "", "… (1000 in all)'; name the field"),
        ({"\x1b[2J": 0}, "", r"found '\x1b[2J'"),
        ({"title": "x"}, "text", "a.jsonl:41: the record has no field text (corpus_field), found 'title'"),
        ({"text": {"a": 1}}, "text", "the field text is an object, expected text or a list of messages"),
        ({"text": None}, "", "the field text is null, expected text or a list of messages"),
        ({"text": ["a", "b"]}, "", "a message of the chat has text, expected role and content"),
        ({"messages": [{"speaker": "x"}]}, "", "a message of the chat has the keys 'speaker', expected role and"),
        ({"question": "x", "answer": ["y"]}, "", "the field answer is a list, expected text"),
        ("words", "text", "the record is text, expected an object with fields of text"),
    ],
)
def test_records_that_are_not_understood(tmp_path: Path, row: Any, fields: str, expected: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": page} for page in PAGES] + [row]))
    assert expected in refusal(tmp_path / "a.jsonl", fields)


@pytest.mark.parametrize("corpus", ["pydoc", "a.txt"])
def test_plain_text_has_no_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n\n".join(PAGES))
    assert f"corpus_field=body has no meaning for the corpus {corpus}" in refusal(Path(corpus), "body")


# --- files

PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
    ".Gz": lambda data: gzip.compress(data[:99]) + gzip.compress(data[99:]),
    ".ZST": lambda data: b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:99], data[99:])),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("kind", [".TXT", ".JSONL", ".json", ".Json"])
def test_files_of_all_kinds(tmp_path: Path, kind: str, packing: str, mark: bytes) -> None:
    rows = [{"text": page} for page in PAGES]
    data = {
        ".TXT": "\n\n".join(PAGES).encode(),
        ".JSONL": jsonl(rows),
        ".json": json.dumps(rows, indent=1).encode(),
        ".Json": jsonl(rows) + b"\r\n",
    }[kind]
    path = tmp_path / f"a{kind}{packing}"
    path.write_bytes(PACKINGS[packing](mark + data))
    texts = found(path)
    pages = texts if kind != ".TXT" else [page for text in texts for page in text.split("\n\n")]
    assert sorted(pages) == sorted(PAGES)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_any_line_separator_may_stand_in_a_string(tmp_path: Path, separator: str) -> None:
    rows = [{"text": f"{page}{separator}and on"} for page in PAGES]
    data = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(data, encoding="utf-8", newline="")
    (tmp_path / "b.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8", newline="")
    for name in ("a.jsonl", "b.json"):
        assert found(tmp_path / name) == sorted(row["text"] for row in rows)


def test_a_parquet_file(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"question": PAGES, "answer": ["so"] * 40}), tmp_path / "a.parquet")
    assert found(tmp_path / "a.parquet") == sorted(f"{page}\n\nso" for page in PAGES)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    assert refusal(tmp_path / "b.parquet").startswith("b.parquet: cannot be read (")


def repeated(text: str, count: int) -> Any:
    """A column that stores `text` once, whatever the `count` of rows."""
    import pyarrow

    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text]))


def test_of_parquet_only_the_columns_that_count_are_read(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns = {"image": [b"\x00"] * 40, "question": PAGES, "task": ["sums"] * 40, "answer": ["so"] * 40}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    rows = list(parquet_records(tmp_path / "a.parquet", TextRows().columns))
    assert rows[0] == ("a.parquet:1", {"question": PAGES[0], "task": "sums", "answer": "so"})
    assert [place for place, _ in rows] == [f"a.parquet:{number}" for number in range(1, 41)]
    assert "no field of the record is known to hold text, found 'image'" in refusal_of(tmp_path, ["image"])
    parquet.write_table(pyarrow.table(columns).slice(0, 0), tmp_path / "empty.parquet")
    assert "is empty" in refusal(tmp_path / "empty.parquet")


def refusal_of(tmp_path: Path, names: list[str]) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({name: [b""] for name in names}), tmp_path / "b.parquet")
    return refusal(tmp_path / "b.parquet")


@pytest.mark.slow
def test_a_small_parquet_file_cannot_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 kB of file, 256 rows of 16 MB; and one row, a list of as many."""
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setattr(files, "MAX_BATCH_BYTES", 256 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    large = repeated("ab " * (16_000_000 // 3), 256)
    chat = pyarrow.StructArray.from_arrays([repeated("user", 256), large], names=["role", "content"])
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 256], pyarrow.int32()), chat)
    for table in (pyarrow.table({"text": large}), pyarrow.table({"messages": lists})):
        parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
        assert (tmp_path / "a.parquet").stat().st_size < 10_000
        assert "32 of its rows take more than 256 MiB of memory, expected rows of text" in refusal(
            tmp_path / "a.parquet"
        )
        assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_millions_of_records_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": page} for page in PAGES]))
    monkeypatch.setattr(_text, "MAX_RECORDS", 40)
    assert found(tmp_path / "a.jsonl") == sorted(PAGES)
    assert "are used" not in caplog.text
    monkeypatch.setattr(_text, "MAX_RECORDS", 30)
    assert found(tmp_path / "a.jsonl") == sorted(PAGES[:30])
    assert "a.jsonl: only its first 30 records are used" in caplog.text


def test_text_without_line_breaks_is_cut_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words' lengths were added up again for each word."""
    lengths: list[int] = []

    class Word(str):
        def __len__(self) -> int:
            lengths.append(1)
            return super().__len__()

    words = [Word("a")] * 4000
    monkeypatch.setattr(_text, "_parts", lambda text: (words, " "))
    assert [len(document) for document in _text.pieces("a " * 200_000)] == [2 * 2048 - 1, 2 * (4000 - 2048) - 1]
    assert len(lengths) <= 2 * len(words)


def test_blank_lines_are_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 MB of line feeds took half a minute: each blank line became a part of its own."""
    splits: list[int] = []
    split = re.split
    monkeypatch.setattr(_text.re, "split", lambda *given: splits.append(len(parts := split(*given))) or parts)
    lines = [f" line {number}" for number in range(100, 140)]
    assert [text.split("\n") for text in _text.pieces(("\n" + "\v\n" * 50).join(lines))] == [
        lines[start : start + 8] for start in range(0, 40, 8)
    ]
    assert max(splits) == 40


WORDS = b"words " * 9999


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.txt", "words".encode("utf-16"), "a.txt: the text is UTF-16 or UTF-32, expected UTF-8; convert it"),
        ("a.jsonl", "words".encode("utf-32"), "a.jsonl: the text is UTF-16 or UTF-32"),
        ("a.txt", b"na\xefve", "a.txt: the text is not UTF-8 at byte 2"),
        ("a.json", b'[{"text": "a"},\n{"text": "b"}\n{}]', "a.json:2: the record is not JSON"),
        ("a.json", b'[{"text": "a"},\n\n{"text": ]', "a.json:3: the record is not JSON"),
        ("a.json", b'[{"text": "a"}] x', "a.json:1: the record is not JSON"),
        ("a.json", b'[{"text": "a"},]', "a.json:1: the record is not JSON"),
        ("a.json", b'[{"text": "a"}', "a.json:1: the record is not JSON"),
        ("a.json", b'{\n"text": "a"\n}', "a.json:1: the record is not JSON; a .jsonl file has one record per line"),
        ("a.json", b"[]", "the corpus a.json is empty"),
        ("a.txt.gz", gzip.compress(WORDS)[:-9], "a.txt.gz: cannot be read (Truncated"),
        ("a.txt.gz", gzip.compress(WORDS)[:-8] + bytes(8), "a.txt.gz: cannot be read (zlib inflate failed"),
        ("a.txt.gz", b"words", "a.txt.gz: cannot be read ("),
        ("a.txt.zst", zstandard.ZstdCompressor().compress(WORDS)[:-3], "a.txt.zst: cannot be read (Truncated"),
        ("a.txt.zst", b"words", "a.txt.zst: cannot be read ("),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert expected in refusal(tmp_path / name)


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_of_what_grows_without_end_only_the_beginning_is_unpacked(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"a.txt{packing}"
    part = PACKINGS[packing](b"words and more words\n" * (1 << 20))
    path.write_bytes(part * 20)
    before = resident_bytes()
    text, size_bytes, is_cut = read_text(path, 1 << 20)
    assert (len(text), size_bytes, is_cut) == (1 << 20, 1 << 20, True)
    assert resident_bytes() - before < 100 << 20, "of 440 MB"


def resident_bytes() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_records_of_a_file_that_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rows = [{"text": page} for page in PAGES]
    (tmp_path / f"a{kind}").write_bytes(jsonl(rows) if kind == ".jsonl" else json.dumps(rows).encode())
    for size in range(1500, 1540):
        monkeypatch.setattr("coldpress.compiler.stages.tokenize.text.MAX_TEXT_BYTES", size)
        texts = found(tmp_path / f"a{kind}")
        assert set(texts) <= set(PAGES)
        assert 900 < sum(map(len, texts)) < size
