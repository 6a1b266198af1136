"""Where benchmarks, their records and what they keep between runs lie."""

from pathlib import Path

from coldpress.schemas.errors import ColdpressError
from tests.support.data import find_data_folder

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
WORK = ROOT / "build" / "benchmarks"
"""Scratch folders and rows of runs that were stopped; git ignores it."""
DATA = find_data_folder()


def data() -> Path:
    """The folder of real checkpoints and corpora.

    Raises:
        ColdpressError: if there is none.
    """
    if DATA is None:
        raise ColdpressError("no real test data; set COLDPRESS_TEST_DATA to its folder")
    return DATA


def names() -> list[str]:
    """The benchmarks that run on this harness, sorted; told by their text, since importing all takes a minute."""
    return sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py") if "class Plugin(Benchmark[" in path.read_text())


def is_timing(name: str) -> bool:
    """Whether a benchmark's figures change on a busy machine; told by its text, too."""
    return "\n    is_timing = True\n" in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")


def record_of(name: str, size: str = "default") -> Path:
    """Where the record of a benchmark at a size is committed."""
    return RESULTS / (f"{name}.json" if size == "default" else f"{name}.{size}.json")
