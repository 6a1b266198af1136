"""Names the places of benchmarks, of their records and of the files that they keep between runs."""

from pathlib import Path

from coldpress.schemas.errors import ColdpressError
from tests.support.data import find_data_folder

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
WORK = ROOT / "build" / "benchmarks"
"""Folder of scratch folders, of rows of stopped runs and of whole records; git ignores it."""
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
"""The documents that show figures of records."""
DATA = find_data_folder()


def data() -> Path:
    """Returns the folder of real checkpoints and corpora.

    Raises:
        ColdpressError: if there is none.
    """
    if DATA is None:
        raise ColdpressError("no real test data; set COLDPRESS_TEST_DATA to its folder")
    return DATA


def names() -> list[str]:
    """Returns the benchmarks that run on this harness, sorted; reads their text, since importing all takes a minute."""
    return sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py") if "class Plugin(Benchmark[" in path.read_text())


def is_timing(name: str) -> bool:
    """Returns whether a busy machine changes a benchmark's figures; reads its text, too."""
    return "\n    is_timing = True\n" in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")


def record_of(name: str, size: str = "default") -> Path:
    """Returns the path of a benchmark's committed record at a size."""
    return RESULTS / (f"{name}.json" if size == "default" else f"{name}.{size}.json")


def whole_record_of(name: str, size: str = "default") -> Path:
    """Returns the path of the record with all rows (harness/shown.py), on the machine that measured it."""
    return WORK / "records" / record_of(name, size).name
