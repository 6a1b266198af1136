"""Defines a benchmark: its options in three sizes, its cells, the rows of a cell, and the figures of all rows."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

Size = Literal["smoke", "default", "full"]
SIZES: tuple[Size, ...] = get_args(Size)
Cell = Mapping[str, Any]
"""Name -> JSON scalar: what one measurement is of."""
Row = dict[str, Any]
Options = TypeVar("Options")
Made = TypeVar("Made")
_SAME: Any = object()


def option(
    default: Any, *, help: str, smoke: Any = _SAME, full: Any = _SAME, choices: Iterable[Any] | None = None
) -> Any:
    """Declares a field of a benchmark's options: one value for each size, and its text in `--help`.

    A tuple becomes a flag that takes several values, a bool a flag without a value. `smoke` and `full` are the default
    where they are not given.
    """
    values = {"smoke": default if smoke is _SAME else smoke, "full": default if full is _SAME else full}
    metadata = {"help": help, "choices": None if choices is None else list(choices), **values}
    return field(default=default, metadata=metadata)


def at_size(kind: type[Options], size: Size, **given: Any) -> Options:
    """The options of a size; those that are given replace the size's own."""
    own = {} if size == "default" else {one.name: one.metadata[size] for one in fields(kind) if one.metadata}  # type: ignore[arg-type]
    return kind(**own | given)


@dataclass(frozen=True)
class Table:
    """A table for people."""

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[object]]


class Benchmark(ABC, Generic[Options]):
    """Measures cells one after the other; a run that is stopped goes on at the first cell that has no rows.

    `python -m benchmarks.<name>` is in its module as `class Plugin(Benchmark[Options])`; the module's docstring is what
    `--help` prints.
    """

    keys: ClassVar[Mapping[str, str]]
    """What the last line holds: path -> meaning. `rows[].ppl` is `ppl` of each row, `*` any key, a last `?` marks what
    may be null or absent. The check of every run holds the last line to it (harness/keys.py)."""
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
    over: ClassVar[Mapping[str, str]] = {}
    """Name in a cell -> the option with its values; each combination is a cell, and the last name varies fastest."""
    full_minutes: ClassVar[float]
    """About how long `--full` takes on two cores."""

    def __init__(self, options: Options, folder: Path) -> None:
        """Takes the options and an empty folder on a disk, which is removed at the end."""
        self.options = options
        self.folder = folder
        self._made: tuple[object, Any] = (None, None)

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """What `make` gave when it was called for `key`; only the latest is held, so sort the cells by it."""
        if self._made[0] != key:
            self._made = (None, None)
            self._made = (key, make())
        return self._made[1]

    def cells(self) -> Iterable[Cell]:
        """Yields what is measured, in order; equal options give equal cells. By default each combination of `over`."""
        for values in itertools.product(*(getattr(self.options, option) for option in self.over.values())):
            yield dict(zip(self.over, values, strict=True))

    @abstractmethod
    def measure(self, cell: Cell) -> Iterable[Row]:
        """Returns the rows of a cell; the cell's own names are added to each."""

    def figures(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """Returns what is found over all rows, beside which the last line has `rows`."""
        return {}

    def tables(self, rows: Sequence[Row], figures: Mapping[str, Any]) -> Iterable[Table]:
        """Returns what people read: by default one table of all rows."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        yield Table(type(self).__module__.rpartition(".")[2], columns, [[row.get(c) for c in columns] for row in rows])


def options_type(kind: type[Benchmark[Any]]) -> type[Any]:
    """The dataclass of a benchmark's options."""
    for base in getattr(kind, "__orig_bases__", ()):
        if found := get_args(base):
            return found[0]
    raise TypeError(f"{kind.__module__}: class Plugin(Benchmark[Options]) names no options")
