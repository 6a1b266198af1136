"""The documents of a corpus and their splits, before anything is tokenized.

Reads `pydoc` (the demo's own corpus), files or a folder of them, or a dataset of the hub. A document belongs to one
split only, and equal documents count once. If the corpus has a part for tests (`test.txt`, `eval.jsonl`), test text
comes from there only. The order of documents depends on their content and the seed, not on their place.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from coldpress.compiler.checkpoint.hub import HUB_ID, check_dataset
from coldpress.compiler.stages.tokenize import pydoc
from coldpress.compiler.stages.tokenize.files import (
    MAX_FILES,
    NAMES_IN_WORDS,
    corpus_files,
    is_parquet,
    is_plain,
    parquet_records,
    read_text,
    records,
)
from coldpress.compiler.stages.tokenize.rows import TextRows
from coldpress.schemas.corpus import SPLITS, Split
from coldpress.schemas.errors import ColdpressError

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 64 << 20
"""Limit on text read from the files of one part: far more than a calibration needs."""
MAX_RECORDS = 1 << 20
"""Limit on records read from one file, so that millions of tiny records end in seconds."""
SHARES: dict[Split, int] = {"calibration": 8, "validation": 1, "test": 1}
MIN_PIECES = 30
DOCUMENT_CHARS = 2048
TEST_NAME = re.compile(r"(^|[^a-z])(test|eval)", re.IGNORECASE)
PYDOC = "pydoc"


@dataclass(frozen=True)
class Documents:
    """A corpus: its name without any path, and the documents of each split in the order of their use."""

    name: str
    splits: Mapping[Split, tuple[str, ...]]
    text_sha256: str
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Documents whose row names a task -> the task's name."""


def read_corpus(
    corpus: str,
    seed: int,
    revision: str | None = None,
    wanted_chars: int = MAX_TEXT_BYTES,
    rows: TextRows | None = None,
) -> Documents:
    """Returns the documents of `corpus`: `pydoc`, a file or a folder of them (compiler/stages/tokenize/files.py), or a
    hub dataset.

    Args:
        wanted_chars: How much of each split of a hub dataset is fetched; files are read whole, up to `MAX_TEXT_BYTES`.

    Raises:
        ColdpressError: if there is no such corpus, it cannot be read, or it is empty.
    """
    check_dataset(corpus, revision)
    rows = rows or TextRows()
    path = Path(corpus).expanduser()
    if corpus == PYDOC:
        _refuse_fields(corpus, rows)
        found = _documents(PYDOC, {split: pydoc.documents(split) for split in SPLITS}, seed)
    elif path.exists():
        found = _read_files(path, seed, rows)
    elif HUB_ID.fullmatch(corpus.partition(":")[0]):
        found = _read_dataset(corpus, revision, seed, wanted_chars, rows)
    else:
        raise ColdpressError(
            f"there is no corpus {corpus}; expected {PYDOC}, a file that ends in {NAMES_IN_WORDS}, a folder of them, "
            "or a hub dataset such as owner/name"
        )
    for names, count in sorted(rows.layouts.items()):
        log.info("tokenize: %s: %d records were read as %s", found.name, count, names)
    return found


def _read_files(path: Path, seed: int, rows: TextRows) -> Documents:
    files = corpus_files(path)
    if not files or len(files) > MAX_FILES:
        found = f"holds {len(files)} files of text" if path.is_dir() else "is no file of text by its name"
        count = f"1 to {MAX_FILES} files " if path.is_dir() else "a name "
        raise ColdpressError(f"the corpus {path.name} {found}, expected {count}that ends in {NAMES_IN_WORDS}")
    if all(map(is_plain, files)):
        _refuse_fields(path.name, rows)
    tests = [file for file in files if TEST_NAME.search(file.stem)] if len(files) > 1 else []
    others = [file for file in files if file not in tests] or files
    tests = tests if others is not files else []
    return _cut(path.resolve().name, _read_all(others, rows), _read_all(tests, rows), seed, rows.tasks)


def _refuse_fields(name: str, rows: TextRows) -> None:
    if rows.fields:
        raise ColdpressError(
            f"corpus_field={'+'.join(rows.fields)} has no meaning for the corpus {name}, which is plain text without "
            "fields; leave it out"
        )


def _read_all(files: Sequence[Path], rows: TextRows) -> list[str]:
    documents: list[str] = []
    remaining = MAX_TEXT_BYTES
    for file in files:
        found, size_bytes, is_cut = _read_file(file, remaining, rows)
        documents += found
        remaining -= size_bytes
        if is_cut:
            log.info("%s: only the first %d bytes of the corpus are used", file.name, MAX_TEXT_BYTES)
        if remaining <= 0:
            break
    return documents


def _read_file(file: Path, max_bytes: int, rows: TextRows) -> tuple[list[str], int, bool]:
    """Returns (documents, bytes read, whether there is more) of a file's first `max_bytes`."""
    if is_parquet(file):
        texts = list(_limited(parquet_records(file, rows.columns), rows, max_bytes))
        size_bytes = sum(map(len, texts))
        return texts, size_bytes, size_bytes >= max_bytes
    text, size_bytes, is_cut = read_text(file, max_bytes)
    if not is_plain(file):
        found = records(file, text, is_cut)
        texts = [rows.text(place, row) for place, row in islice(found, MAX_RECORDS)]
        if next(found, None) is not None:
            log.info("%s: only its first %d records are used", file.name, MAX_RECORDS)
        return texts, size_bytes, is_cut
    return pieces(text.rpartition("\n")[0] if is_cut and "\n" in text else text), size_bytes, is_cut


def pieces(text: str) -> list[str]:
    """Cuts a plain text into documents of about `DOCUMENT_CHARS`: whole paragraphs; lines if it has few paragraphs;
    else words. Short texts give smaller documents, so that there are enough to split."""
    parts, glue = _parts(text)
    target = min(DOCUMENT_CHARS, len(text) // (2 * MIN_PIECES))
    documents: list[str] = []
    pending: list[str] = []
    size = 0
    for part in parts:
        pending.append(part)
        size += len(part)
        if size >= target:
            documents.append(glue.join(pending))
            pending, size = [], 0
    return [*documents, glue.join(pending)] if pending else documents


def _parts(text: str) -> tuple[list[str], str]:
    """Returns (parts, their separator), cut at the coarsest of paragraph, line and word that gives enough parts."""
    parts, glue = [text], ""
    # blank lines go with the line feed before them: a part for each would take seconds and gigabytes
    for pattern, separator in ((r"\n[ \t\r]*\n\s*", "\n\n"), (r"\n\s*\n|\n", "\n"), (r"\s+", " ")):
        parts, glue = [part for part in re.split(pattern, text) if part.strip()], separator
        if len(parts) >= MIN_PIECES:
            break
    return parts, glue


def _cut(name: str, texts: Sequence[str], tests: Sequence[str], seed: int, tasks: Mapping[str, str]) -> Documents:
    """Splits documents by size; with `tests` the test split is exactly those, which the other splits then lack."""
    used: list[Split] = ["calibration", "validation"] if tests else list(SPLITS)
    held_out = set(tests)
    ordered = _ordered((text for text in texts if text not in held_out), seed)
    total = sum(map(len, ordered))
    shares = [SHARES[split] for split in used]
    bounds = [total * sum(shares[: index + 1]) / sum(shares) for index in range(len(used))]
    found: dict[Split, list[str]] = {split: [] for split in SPLITS}
    done = 0
    for text in ordered:
        middle = done + len(text) / 2  # a long document goes where most of it belongs
        found[used[next(index for index, bound in enumerate(bounds) if middle <= bound)]].append(text)
        done += len(text)
    found["test"] += tests
    return _documents(name, found, seed, tasks)


def _documents(
    name: str, splits: Mapping[Split, Sequence[str]], seed: int, tasks: Mapping[str, str] | None = None
) -> Documents:
    ordered: dict[Split, tuple[str, ...]] = {split: _ordered(splits[split], seed) for split in SPLITS}
    if not any(ordered.values()):
        raise ColdpressError(f"the corpus {name} is empty, expected text to calibrate on")
    hasher = hashlib.sha256()
    for text in sorted({text for texts in ordered.values() for text in texts}):
        hasher.update(hashlib.sha256(text.encode()).digest())
    return Documents(name, ordered, hasher.hexdigest(), tasks or {})


def _ordered(texts: Iterator[str] | Sequence[str], seed: int) -> tuple[str, ...]:
    """Returns distinct, non-empty documents in a mixed order: by digest of seed and content."""
    distinct = {text for text in texts if text.strip()}
    return tuple(sorted(distinct, key=lambda text: hashlib.sha256(f"{seed}/{text}".encode()).digest()))


def _read_dataset(corpus: str, revision: str | None, seed: int, wanted_chars: int, rows: TextRows) -> Documents:
    """Reads `owner/name` or `owner/name:subset` of the hub at a commit; never runs a dataset's script. Streamed:
    fetching stops when a split has `wanted_chars` of text."""
    from datasets import load_dataset
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ColdpressError(
            f"the dataset {corpus} is streamed from the hub, and HF_HUB_OFFLINE forbids the network; allow it or give "
            "a local text file"
        )
    hub_id, _, subset = corpus.partition(":")
    try:
        found = load_dataset(hub_id, subset or None, revision=revision, streaming=True)
        texts: dict[str, list[str]] = {}
        for split, part in found.items():
            numbered = ((f"{corpus}, {split}:{number}", row) for number, row in enumerate(part, 1))
            texts[str(split)] = list(_limited(numbered, rows, wanted_chars))
    except ColdpressError:
        raise
    except Exception as error:  # datasets raises errors of many packages
        reason = " ".join(str(error).split())[:300]
        raise ColdpressError(
            f"the dataset {corpus} at revision {revision} cannot be loaded ({reason}); check the subset and the "
            "revision, or give a local text file instead"
        ) from error
    tests = texts.pop("test", []) if len(texts) > 1 else []
    others = [text for split in sorted(texts) for text in texts[split]]
    return _cut(hub_id, others, tests, seed, rows.tasks)


def _limited(found: Iterable[tuple[str, Any]], rows: TextRows, wanted_chars: int) -> Iterator[str]:
    """Yields texts of records from the first on, until they have `wanted_chars`; fetches no record after that."""
    size = 0
    for place, row in found:
        text = rows.text(place, row)
        yield text
        size += len(text)
        if size >= wanted_chars:
            return
