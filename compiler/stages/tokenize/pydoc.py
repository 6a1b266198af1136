"""Decides which text the demo model is trained, calibrated and measured on.

Reads two things that a CPython installation carries: pydoc_data.topics and the docstrings of the standard library's
source files, which are parsed with ast and never imported. Returns whole documents (one per topic, one per source file)
in four disjoint splits. A document's split depends on its name alone, so another patch version of CPython, with
slightly different text, does not move a document from one split to another.
"""

import argparse
import ast
import functools
import hashlib
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

SPLITS = ("train", "calibration", "validation", "test")

# Chosen so that CPython 3.11 gives about 400 kB, 100 kB and 100 kB of held-out text.
SPLIT_SALT = "coldpress-demo-1635"
SPLIT_SHARES = {"calibration": 0.2, "validation": 0.05, "test": 0.05}

# Without "test", "tests": many distributions leave those folders out, and their docstrings are
# mostly doctest programs.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test"}

# Shorter paragraphs ("Example:") recur by chance; longer ones that recur are copies.
SHORTEST_UNIQUE_CHARS = 40
SHORTEST_DOCUMENT_CHARS = 80

_UNDERLINE = re.compile(r"^[ \t]*([=*~^#_+.\"-])\1{2,}[ \t]*$\n?", re.MULTILINE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_CREDITS = re.compile(r"copyright|all rights reserved|\bauthors?\b|written by|contributed by|\w@\w+\.\w", re.IGNORECASE)


Document = tuple[str, str]
"""(name, which decides the split, text) of one topic or one source file."""


def clean(text: str) -> str:
    """Returns plain lines: no tabs, control characters, heading underlines or trailing blanks."""
    text = _CONTROL.sub("", text.expandtabs(4))
    text = _UNDERLINE.sub("", text)
    return "\n".join(line.rstrip() for line in text.split("\n")).strip("\n")


def docstrings(source: bytes) -> Iterator[str]:
    """Yields the docstrings of a module and of its classes and functions, in source order. Visits only bodies of
    modules, classes and functions: a full ast.walk costs several times as much and finds a handful more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pending: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):  # the test suite carries broken files on purpose
        return
    while pending:
        node = pending.pop()
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if text:
            yield text
        pending.extend(reversed(node.body))


def module_texts(root: Path) -> Iterator[Document]:
    """Yields one document per source file that has docstrings."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    for path in sorted((path for path in found if not SKIPPED_FOLDERS.intersection(path.parts)), key=Path.as_posix):
        source = (root / path).read_bytes()
        if b'"""' not in source and b"'''" not in source:
            continue  # skips parsing, which takes most of the time
        text = "\n\n".join(docstrings(source))
        if text:
            yield f"module:{path.as_posix()}", text


def unique_paragraphs(text: str, seen: set[str]) -> str:
    """Returns `text` without credits and without paragraphs already in `seen`; extends `seen`."""
    kept = []
    short_here: set[str] = set()
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", clean(text)):
        key = " ".join(paragraph.split())
        known = seen if len(key) >= SHORTEST_UNIQUE_CHARS else short_here
        if not key or key in known or _CREDITS.search(paragraph):
            continue
        known.add(key)
        kept.append(paragraph)
    return "\n\n".join(kept)


def split_of(name: str) -> str:
    digest = hashlib.sha256(f"{SPLIT_SALT}/{name}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    for split, share in SPLIT_SHARES.items():
        if place < share:
            return split
        place -= share
    return "train"


@functools.lru_cache(maxsize=1)
def corpus() -> dict[str, tuple[Document, ...]]:
    """Returns every document, cleaned and without repeats, by split."""
    from pydoc_data.topics import topics  # the texts behind help('TOPIC')

    seen: set[str] = set()
    found: dict[str, list[Document]] = {split: [] for split in SPLITS}
    by_topic = ((f"topic:{name}", topics[name]) for name in sorted(topics))
    for name, raw in chain(by_topic, module_texts(Path(sysconfig.get_path("stdlib")))):
        text = unique_paragraphs(raw, seen)
        if len(text) >= SHORTEST_DOCUMENT_CHARS:
            found[split_of(name)].append((name, text))
    return {split: tuple(items) for split, items in found.items()}


def named_documents(split: str) -> tuple[Document, ...]:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
    return corpus()[split]


def documents(split: str) -> list[str]:
    return [text for _, text in named_documents(split)]


def main(argv: list[str] | None = None) -> int:
    """Writes one split as UTF-8 text, with two blank lines between documents."""
    parser = argparse.ArgumentParser(
        prog="python -m coldpress.compiler.stages.tokenize.pydoc", description=main.__doc__
    )
    parser.add_argument("--split", choices=SPLITS, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    texts = documents(args.split)
    data = "\n\n\n".join(texts).encode("utf-8", "replace") + b"\n"
    args.output.write_bytes(data)
    print(f"{args.split}: {len(texts)} documents, {len(data)} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
