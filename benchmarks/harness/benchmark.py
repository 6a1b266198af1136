"""Defines a benchmark: its options in three sizes, its cells, the rows of a cell, and the figures of all rows."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from benchmarks.harness.tables import Table, tables_of

Size = Literal["smoke", "default", "full"]
SIZES: tuple[Size, ...] = get_args(Size)
Cell = Mapping[str, Any]
"""Subject of one measurement: name -> JSON scalar."""
Row = dict[str, Any]
Rows = Sequence[Row]
Figures = Mapping[str, Any]
Part = Mapping[str, str | Sequence[Any]]
"""Name in a cell -> its values, or the name of the option that holds them or their number."""
Options = TypeVar("Options")
Made = TypeVar("Made")
_SAME: Any = object()


def option(
    default: Any, *, help: str, smoke: Any = _SAME, full: Any = _SAME, choices: Iterable[Any] | None = None
) -> Any:
    """Declares a field of a benchmark's options: one value for each size, and its text in `--help`.

    A tuple becomes a flag that takes several values, a bool a flag without a value. `smoke` and `full` default to
    `default`.
    """
    values = {"smoke": default if smoke is _SAME else smoke, "full": default if full is _SAME else full}
    metadata = {"help": help, "choices": None if choices is None else list(choices), **values}
    return field(default=default, metadata=metadata)


def at_size(kind: type[Options], size: Size, **given: Any) -> Options:
    """Returns the options of a size; `given` ones replace the size's own."""
    own = {} if size == "default" else {one.name: one.metadata[size] for one in fields(kind) if one.metadata}  # type: ignore[arg-type]
    return kind(**own | given)


class Benchmark(ABC, Generic[Options]):
    """Measures cells one after the other; a run that was stopped goes on at the first cell without rows.

    A module benchmarks/<name>.py defines `class Plugin(Benchmark[Options])`, and `python -m benchmarks.<name>` runs it.
    `--help` prints the module's docstring.
    """

    keys: ClassVar[Mapping[str, str]]
    """Keys of the last line: path -> meaning. `rows[].ppl` is `ppl` of each row, `*` any key; a trailing `?` marks a
    key that may be null or absent. Every run checks its last line against them (harness/keys.py). Keys that a cell
    takes from an option are documented by the option."""
    is_timing: ClassVar[bool] = False
    """Whether a busy machine changes its figures; the workflow then runs nothing beside it."""
    needs_data: ClassVar[bool] = False
    """Whether it reads the folder of real checkpoints and corpora."""
    needs_root: ClassVar[bool] = False
    """Whether it caps memory or reads, which only root may."""
    extra: ClassVar[str] = ""
    """The extra of pyproject.toml that it needs, with the package that the extra brings: `llama: xllamacpp`."""
    programs: ClassVar[tuple[str, ...]] = ()
    """Programs that it starts."""
    over: ClassVar[Part | Sequence[Part]] = {}
    """Parts of the cells: each combination of a part's values is a cell; the last name varies fastest."""
    full_minutes: ClassVar[float]
    """Approximate minutes of `--full` on two cores."""

    def __init__(self, options: Options, folder: Path) -> None:
        """Takes the options and an empty folder on a disk, which is removed at the end."""
        self.options = options
        self.folder = folder
        self._made: tuple[object, Any] = (None, None)

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """Returns what `make` gives for `key`, calling it once; only the latest is held, so sort the cells by key."""
        if self._made[0] != key:
            self._made = (None, None)
            self._made = (key, make())
        return self._made[1]

    def cells(self) -> Iterable[Cell]:
        """Yields the cells in order, by default each combination of `over`; equal options give equal cells."""
        for part in parts_of(type(self)):
            for values in itertools.product(*map(self._values, part.values())):
                yield dict(zip(part, values, strict=True))

    def _values(self, of: str | Sequence[Any]) -> Iterable[Any]:
        found = getattr(self.options, of) if isinstance(of, str) else of
        if isinstance(found, int):
            return range(found)
        return (found,) if isinstance(found, str | float) else found

    @abstractmethod
    def measure(self, cell: Cell) -> Iterable[Row]:
        """Returns the rows of a cell; the cell's own names are added to each."""

    def figures(self, rows: Rows) -> Figures:
        """Returns the figures over all rows; the last line has them beside `rows`."""
        return {}

    def tables(self, rows: Rows, figures: Figures) -> Iterable[Table]:
        """Returns the tables for people."""
        return tables_of(type(self).__module__.rpartition(".")[2], rows, figures)


def parts_of(kind: type[Benchmark[Any]]) -> Sequence[Part]:
    """Returns `over` as a list."""
    return [kind.over] if isinstance(kind.over, Mapping) else kind.over


def documented(kind: type[Benchmark[Any]]) -> dict[str, str]:
    """Returns the keys of a benchmark, with those that its cells take from options."""
    parts, found = parts_of(kind), dict[str, str]()
    helps = {one.name: one.metadata["help"] for one in fields(options_type(kind)) if one.metadata}
    for part in parts:
        for name, of in part.items():
            if isinstance(of, str) and not {f"rows[].{name}", f"rows[].{name}?"} & kind.keys.keys():
                found[f"rows[].{name}{'' if all(name in other for other in parts) else '?'}"] = helps[of]
    return found | {**kind.keys}


def options_type(kind: type[Benchmark[Any]]) -> type[Any]:
    """Returns the dataclass of a benchmark's options."""
    for base in getattr(kind, "__orig_bases__", ()):
        if found := get_args(base):
            return found[0]
    raise TypeError(f"{kind.__module__}: class Plugin(Benchmark[Options]) names no options")
