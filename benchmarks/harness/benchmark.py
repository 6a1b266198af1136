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
"""Name -> JSON scalar: what one measurement is of."""
Row = dict[str, Any]
Rows = Sequence[Row]
Figures = Mapping[str, Any]
Part = Mapping[str, str | Sequence[Any]]
"""Name in a cell -> its values, or the option that has them, or their number."""
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


class Benchmark(ABC, Generic[Options]):
    """Measures cells one after the other; a run that is stopped goes on at the first cell that has no rows.

    `python -m benchmarks.<name>` is in its module as `class Plugin(Benchmark[Options])`; the module's docstring is what
    `--help` prints.
    """

    keys: ClassVar[Mapping[str, str]]
    """What the last line holds: path -> meaning. `rows[].ppl` is `ppl` of each row, `*` any key, a last `?` marks what
    may be null or absent. The check of every run holds the last line to it (harness/keys.py). What a cell has of an
    option need not be told again."""
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
    """What cells are of: each combination is a cell, and the last name varies fastest; parts follow each other."""
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
        """Returns what is found over all rows, beside which the last line has `rows`."""
        return {}

    def tables(self, rows: Rows, figures: Figures) -> Iterable[Table]:
        """Returns what people read."""
        return tables_of(type(self).__module__.rpartition(".")[2], rows, figures)


def parts_of(kind: type[Benchmark[Any]]) -> Sequence[Part]:
    """`over` as a list."""
    return [kind.over] if isinstance(kind.over, Mapping) else kind.over


def documented(kind: type[Benchmark[Any]]) -> dict[str, str]:
    """The keys of a benchmark, with those that its cells have of options."""
    parts, found = parts_of(kind), dict[str, str]()
    helps = {one.name: one.metadata["help"] for one in fields(options_type(kind)) if one.metadata}
    for part in parts:
        for name, of in part.items():
            if isinstance(of, str) and not {f"rows[].{name}", f"rows[].{name}?"} & kind.keys.keys():
                found[f"rows[].{name}{'' if all(name in other for other in parts) else '?'}"] = helps[of]
    return found | {**kind.keys}


def options_type(kind: type[Benchmark[Any]]) -> type[Any]:
    """The dataclass of a benchmark's options."""
    for base in getattr(kind, "__orig_bases__", ()):
        if found := get_args(base):
            return found[0]
    raise TypeError(f"{kind.__module__}: class Plugin(Benchmark[Options]) names no options")
