"""Documents of a corpus and which split each belongs to, before anything is tokenized.

Reads `pydoc` (the demo's own corpus), .txt and .jsonl files, folders of them, or a dataset of the hub. A document is in
one split only, equal documents are one, and where the corpus has a part for tests (`test.txt`, `eval.jsonl`), test text
is taken from there alone. The order of documents follows from their content and the seed, not from their place.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiler.checkpoint.hub import HUB_ID, check_dataset
from compiler.tokenize import pydoc
from schemas.corpus import SPLITS, Split
from schemas.errors import ColdpressError

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 64 << 20
"""Read of the files of one part: far more than a calibration needs."""
MAX_FILES = 1000
SHARES: dict[Split, int] = {"calibration": 8, "validation": 1, "test": 1}
MIN_PIECES = 30
DOCUMENT_CHARS = 2048
TEXT_FIELDS = ("text", "story", "content")
TASK_FIELD = "task"
"""Field of a row that says which task its text is of; optional."""
MAX_TASK_CHARS = 100
TEST_NAME = re.compile(r"(^|[^a-z])(test|eval)", re.IGNORECASE)
PYDOC = "pydoc"


@dataclass(frozen=True)
class Documents:
    """A corpus: its name without any path, and the documents of each split in the order they are to be used."""

    name: str
    splits: Mapping[Split, tuple[str, ...]]
    text_sha256: str
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Documents whose row names a task, and its name."""


def read_corpus(corpus: str, seed: int, revision: str | None = None, wanted_chars: int = MAX_TEXT_BYTES) -> Documents:
    """The documents of `corpus`: `pydoc`, a .txt or .jsonl file, a folder of them, or a hub dataset id.

    Args:
        corpus: The name or path.
        seed: Decides order and splits.
        revision: The commit of a hub dataset.
        wanted_chars: How much of each split of a hub dataset is fetched; files are read whole, up to `MAX_TEXT_BYTES`.

    Raises:
        ColdpressError: if there is no such corpus, it cannot be read, or it is empty.
    """
    check_dataset(corpus, revision)
    if corpus == PYDOC:
        return _documents(PYDOC, {split: pydoc.documents(split) for split in SPLITS}, seed)
    path = Path(corpus).expanduser()
    if path.exists():
        files = _files(path)
        tests = [file for file in files if TEST_NAME.search(file.stem)] if len(files) > 1 else []
        others = [file for file in files if file not in tests] or files
        tests = tests if others is not files else []
        tasks: dict[str, str] = {}
        return _cut(path.resolve().name, _read_all(others, tasks), _read_all(tests, tasks), seed, tasks)
    if not HUB_ID.fullmatch(corpus.partition(":")[0]):
        raise ColdpressError(
            f"there is no corpus {corpus}; expected {PYDOC}, a .txt or .jsonl file, a folder of them, or a hub dataset "
            "such as owner/name"
        )
    return _read_dataset(corpus, revision, seed, wanted_chars)


def _files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    texts = [file for file in files if file.suffix in (".txt", ".jsonl") and file.is_file()]
    if not texts or len(texts) > MAX_FILES:
        raise ColdpressError(
            f"the corpus {path.name} holds {len(texts)} .txt or .jsonl files, expected 1 to {MAX_FILES}"
        )
    return texts


def _read_all(files: Sequence[Path], tasks: dict[str, str]) -> list[str]:
    """The documents of files; `tasks` gets the names of theirs."""
    documents: list[str] = []
    remaining = MAX_TEXT_BYTES
    for file in files:
        with file.open("rb") as opened:
            data = opened.read(remaining + 1)
        if len(data) > remaining:
            log.info("%s: only the first %d bytes of the corpus are used", file.name, MAX_TEXT_BYTES)
            data = data[:remaining].rpartition(b"\n")[0]
        documents += _read_file(file, data, tasks)
        remaining -= len(data)
        if remaining <= 0:
            break
    return documents


def _read_file(file: Path, data: bytes, tasks: dict[str, str]) -> list[str]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ColdpressError(f"{file.name}: the text is not UTF-8 at byte {error.start}; convert it") from error
    return list(_rows(file.name, text, tasks)) if file.suffix == ".jsonl" else pieces(text)


def _rows(name: str, text: str, tasks: dict[str, str]) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ColdpressError(f"{name}: line {number} is not JSON") from error
        yield _document(name, number, row, tasks)


def _document(name: str, number: int, row: Any, tasks: dict[str, str]) -> str:
    """A row's text; `tasks` gets the task that it names."""
    text = _field(name, number, row)
    task = row.get(TASK_FIELD)
    if isinstance(task, str) and task.strip() and text not in tasks:
        tasks[text] = task.strip()[:MAX_TASK_CHARS]
    return text


def _field(name: str, number: int, row: Any) -> str:
    found = [row[field] for field in TEXT_FIELDS if field in row] if isinstance(row, Mapping) else []
    if not found or not isinstance(found[0], str):
        raise ColdpressError(f"{name}: row {number} has no text, expected one of the fields {', '.join(TEXT_FIELDS)}")
    if any("\ud800" <= character <= "\udfff" for character in found[0]):
        raise ColdpressError(f"{name}: row {number} holds half a surrogate pair, expected text")
    return found[0]


def pieces(text: str) -> list[str]:
    """A plain text as documents of about `DOCUMENT_CHARS`: paragraphs put together, in a text without them lines, in
    one without these words; smaller where the text is short, so that there are enough to split."""
    parts, glue = _parts(text)
    target = min(DOCUMENT_CHARS, len(text) // (2 * MIN_PIECES))
    documents: list[str] = []
    pending: list[str] = []
    for part in parts:
        pending.append(part)
        if sum(map(len, pending)) >= target:
            documents.append(glue.join(pending))
            pending = []
    return [*documents, glue.join(pending)] if pending else documents


def _parts(text: str) -> tuple[list[str], str]:
    """(parts, what joins them) at the coarsest of paragraph, line and word that gives enough."""
    parts, glue = [text], ""
    for pattern, separator in ((r"\n[ \t\r]*\n\s*", "\n\n"), (r"\n", "\n"), (r"\s+", " ")):
        parts, glue = [part for part in re.split(pattern, text) if part.strip()], separator
        if len(parts) >= MIN_PIECES:
            break
    return parts, glue


def _cut(name: str, texts: Sequence[str], tests: Sequence[str], seed: int, tasks: Mapping[str, str]) -> Documents:
    """Splits documents by size; with `tests` the test split is that, and nothing of it is in the others."""
    used: list[Split] = ["calibration", "validation"] if tests else list(SPLITS)
    held_out = set(tests)
    ordered = _ordered((text for text in texts if text not in held_out), seed)
    total = sum(map(len, ordered))
    shares = [SHARES[split] for split in used]
    bounds = [total * sum(shares[: index + 1]) / sum(shares) for index in range(len(used))]
    found: dict[Split, list[str]] = {split: [] for split in SPLITS}
    done = 0
    for text in ordered:
        middle = done + len(text) / 2  # so that a long document goes where most of it belongs
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
    """Distinct, non-empty documents in an order that mixes them: by digest of seed and content."""
    distinct = {text for text in texts if text.strip()}
    return tuple(sorted(distinct, key=lambda text: hashlib.sha256(f"{seed}/{text}".encode()).digest()))


def _read_dataset(corpus: str, revision: str | None, seed: int, wanted_chars: int) -> Documents:
    """`owner/name` or `owner/name:subset` of the hub at a commit; scripts of datasets are never run.

    Streamed: of each of its splits no more is fetched than `wanted_chars` of text are in.
    """
    from datasets import load_dataset
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise ColdpressError(
            f"the dataset {corpus} is streamed from the hub, and HF_HUB_OFFLINE forbids the network; allow it or give "
            "a local text file"
        )
    hub_id, _, subset = corpus.partition(":")
    tasks: dict[str, str] = {}
    try:
        found = load_dataset(hub_id, subset or None, revision=revision, streaming=True)
        texts = {str(split): list(_limited(corpus, rows, tasks, wanted_chars)) for split, rows in found.items()}
    except ColdpressError:
        raise
    except Exception as error:  # it raises types of many packages
        reason = " ".join(str(error).split())[:300]
        raise ColdpressError(
            f"the dataset {corpus} at revision {revision} cannot be loaded ({reason}); check the subset and the "
            "revision, or give a local text file instead"
        ) from error
    tests = texts.pop("test", []) if len(texts) > 1 else []
    others = [text for split in sorted(texts) for text in texts[split]]
    return _cut(hub_id, others, tests, seed, tasks)


def _limited(corpus: str, rows: Any, tasks: dict[str, str], wanted_chars: int) -> Iterator[str]:
    """Texts of rows from the first on, until they are `wanted_chars` long; no row behind is fetched."""
    size = 0
    for number, row in enumerate(rows, 1):
        text = _document(corpus, number, row, tasks)
        yield text
        size += len(text)
        if size >= wanted_chars:
            return
