"""The files of a corpus: which files count, and their content as text or as records with the line where each begins.

A file is text (.txt), one record per line (.jsonl), a list of records (.json), or parquet; text may be packed (.gz,
.zst). Letter case of names does not matter. Packed files are unpacked as a stream, only as far as they are used.
"""

import codecs
import json
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldpress.schemas.errors import ColdpressError

MAX_FILES = 1000
NAMES = re.compile(r".*\.(?:(?P<text>txt|jsonl|json)(?:\.(?P<packing>gz|zst))?|(?P<parquet>parquet))", re.I | re.S)
NAMES_IN_WORDS = ".txt, .jsonl, .json (also with .gz or .zst behind it) or .parquet"
PACKINGS = {"gz": "gzip", "zst": "zstd"}
"""File endings -> pyarrow's names."""
MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
"""First bytes of text in other encodings; little-endian UTF-32 begins as UTF-16 does."""
BATCH_ROWS = 32
READ_BYTES = 1 << 20
MAX_BATCH_BYTES = 2 << 30
"""Address space for a few rows of parquet, far more than text takes."""


def corpus_files(path: Path) -> list[Path]:
    """Returns the sorted files of a corpus that is a file or a folder; skips files whose names are not those of text.
    Raises ColdpressError if a folder cannot be read."""
    found = sorted(_below(path)) if path.is_dir() else [path]
    return [file for file in found if NAMES.fullmatch(file.name) and file.is_file()]


def _below(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder and its subfolders; refuses an unreadable one instead of skipping it."""

    def unreadable(error: OSError) -> None:
        raise ColdpressError(
            f"the corpus {folder.name}: its folder {Path(error.filename).name} cannot be read ({error.strerror}); make "
            "it readable, or move it elsewhere"
        ) from error

    for parent, folders, files in os.walk(folder, onerror=unreadable):
        yield from (Path(parent, name) for name in (*folders, *files))


def is_plain(file: Path) -> bool:
    return _part(file, "text") == "txt"


def is_parquet(file: Path) -> bool:
    return _part(file, "parquet") != ""


def read_text(file: Path, max_bytes: int) -> tuple[str, int, bool]:
    """Returns (text of the file's first `max_bytes`, unpacked bytes read, whether there is more). Raises ColdpressError
    if it cannot be read or unpacked, or is not UTF-8."""
    data = _read(file, max_bytes + 1)
    is_cut = len(data) > max_bytes
    data = data[:max_bytes]
    if data.startswith(MARKS):
        raise ColdpressError(f"{file.name}: the text is UTF-16 or UTF-32, expected UTF-8; convert it with iconv")
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=not is_cut)
    except UnicodeDecodeError as error:
        raise ColdpressError(f"{file.name}: the text is not UTF-8 at byte {error.start}; convert it") from error
    return text, len(data), is_cut


def records(file: Path, text: str, is_cut: bool) -> Iterator[tuple[str, Any]]:
    """Yields (place as `name:line`, value) of each record in the text of a .jsonl or .json file.

    Lines end at line feeds only: U+2028 and similar characters may stand inside JSON's strings.

    Raises:
        ColdpressError: at the first record that is not JSON, unless the text was cut there: a cut record is dropped.
    """
    if _part(file, "text") == "json" and (opening := re.match(r"\s*\[\s*", text)):
        yield from _of_list(file.name, text, opening.end(), is_cut)
        return
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1] if is_cut else lines, 1):
        if line.strip():
            place = f"{file.name}:{number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # too long an integer is a ValueError, too
                raise _not_json(place) from error
            yield place, value


def parquet_records(
    file: Path, choose: Callable[[str, Sequence[str]], Sequence[str]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place as `name:row`, record) of each row of a parquet file. `choose` returns the columns to read, given
    the place of the first row and the names of all columns.

    A few kilobytes of parquet can expand to terabytes of rows. So only the needed columns are read, a few rows at a
    time, and never with more than `MAX_BATCH_BYTES` of memory.

    Raises:
        ColdpressError: if the file cannot be read, or a few of its rows take too much memory.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with _limited_memory(file):
            opened = ParquetFile(file, buffer_size=READ_BYTES)
        with opened:
            columns = choose(f"{file.name}:1", opened.schema_arrow.names) if opened.metadata.num_rows else ()
            batches = opened.iter_batches(batch_size=BATCH_ROWS, columns=list(columns), use_threads=False)
            for number, row in enumerate(_rows(file, batches), 1):
                yield f"{file.name}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _rows(file: Path, batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Yields rows of record batches; memory is limited while the next batch is read, not while its rows are used."""
    while True:
        with _limited_memory(file):
            batch = next(batches, None)
            rows = [] if batch is None else batch.to_pylist()
        if batch is None:
            return
        yield from rows


@contextmanager
def _limited_memory(file: Path) -> Iterator[None]:
    """Limits the process to `MAX_BATCH_BYTES` more address space; turns a failed allocation into a sentence."""
    import pyarrow

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limits = [pages * resource.getpagesize() + MAX_BATCH_BYTES]
    limits += [old for old in before if old != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    except (MemoryError, pyarrow.ArrowMemoryError) as error:
        raise ColdpressError(
            f"{file.name}: {BATCH_ROWS} of its rows take more than {MAX_BATCH_BYTES >> 20} MiB of memory, expected "
            "rows of text; write it again with shorter rows"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _part(file: Path, name: str) -> str:
    found = NAMES.fullmatch(file.name)
    return (found[name] or "").lower() if found else ""


def _read(file: Path, max_bytes: int) -> bytes:
    packing = _part(file, "packing")
    try:
        with file.open("rb") as opened:
            if not packing:
                return opened.read(max_bytes)
            import pyarrow

            with pyarrow.CompressedInputStream(opened, PACKINGS[packing]) as unpacked:
                return unpacked.read(max_bytes)
    except OSError as error:  # pyarrow raises it for damaged files, too
        raise _unreadable(file, error) from error


def _of_list(name: str, text: str, position: int, is_cut: bool) -> Iterator[tuple[str, Any]]:
    """Yields the elements of a JSON list, the first at `position`, with their lines; a cut text may end early."""
    decoder, behind = json.JSONDecoder(), re.compile(r"\s*([,\]])\s*")
    line = 1 + text.count("\n", 0, position)
    if text[position : position + 1] == "]":
        return
    while True:
        place = f"{name}:{line}"
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            if is_cut:
                return
            raise _not_json(place) from error
        found = behind.match(text, end)
        if found is None and is_cut:
            return
        if found is None or (found[1] == "]" and found.end() < len(text)):
            raise _not_json(place)
        yield place, value
        if found[1] == "]":
            return
        line += text.count("\n", position, found.end())
        position = found.end()


def _not_json(place: str) -> ColdpressError:
    return ColdpressError(
        f"{place}: the record is not JSON; a .jsonl file has one record per line, a .json file the same or "
        "a list of records"
    )


def _unreadable(file: Path, error: Exception) -> ColdpressError:
    reason = " ".join(str(error).split())[:200]
    return ColdpressError(f"{file.name}: cannot be read ({reason}); copy or download the file again")
