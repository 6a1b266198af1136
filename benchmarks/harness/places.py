"""Where benchmarks, their records and what they keep between runs lie."""

from pathlib import Path

from tests.support.data import find_data_folder

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
WORK = ROOT / "build" / "benchmarks"
"""Scratch folders and rows of runs that were stopped; git ignores it."""
DATA = find_data_folder()


def names() -> list[str]:
    """All benchmarks, sorted."""
    return sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py"))


def is_timing(name: str) -> bool:
    """Whether a benchmark's figures change on a busy machine; told by its text, since importing all takes a minute."""
    return "\n    is_timing = True\n" in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")


def record_of(name: str, size: str = "default") -> Path:
    """Where the record of a benchmark at a size is committed."""
    return RESULTS / (f"{name}.json" if size == "default" else f"{name}.{size}.json")
