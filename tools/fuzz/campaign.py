"""Draws mutants by number, tries them, and shrinks the list of edits of a failure.

A mutant depends only on the seed and its number: a base, one to four edits, and a mending, which makes digests
consistent again. Each edit has its own random generator: without one edit, the others still draw the same and only find
another state.
"""

import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

from tools.fuzz.json_edits import Unfit
from tools.fuzz.limited import BAD, Ended

Edit = Callable[[Path, random.Random], str]
"""Changes a folder and describes the change; raises Unfit if it does not apply."""
NUM_EDITS = (1, 1, 1, 2, 2, 3, 4)
SILENT = "silent"
"""The kind of a run that did not notice damage: not one of CLASSES, but a failure like BAD."""


@dataclass(frozen=True)
class Mutant:
    """A base, its edits and its mending."""

    number: int
    base: str
    edits: tuple[tuple[str, int], ...]
    """(name of an edit, seed of its random generator), in order."""
    mending: str
    """Which digests are made consistent again: one of the target's `MENDINGS`."""


@dataclass(frozen=True)
class Run:
    """One command on a mutant."""

    command: str
    ended: Ended

    @property
    def failed(self) -> bool:
        """Whether it ended in a way that no input may cause."""
        return self.ended.kind in (*BAD, SILENT)


@dataclass(frozen=True)
class Outcome:
    """A mutant and how all commands ended on it."""

    mutant: Mutant
    done: tuple[str, ...]
    """A description of each edit's change."""
    runs: tuple[Run, ...]


class Target(Protocol):
    """A kind of input to mutate, and the commands that must survive it."""

    EDITS: Mapping[str, tuple[Edit, int]]
    """Name -> (edit, weight in the draw)."""
    MENDINGS: Sequence[str]
    bases: Sequence[str]

    def copy(self, base: str, folder: Path) -> None:
        """Makes `folder` a copy of a base."""
        ...

    def mend(self, folder: Path, mending: str) -> None:
        """Makes digests consistent again, as `mending` says."""
        ...

    def runs(self, mutant: Mutant, folder: Path, scratch: Path) -> Iterator[Run]:
        """Runs every command on the mutant in `folder`, one after another."""
        ...


def draw(target: Target, seed: int, number: int) -> Mutant:
    """Draws mutant `number` of a seed."""
    chance = random.Random(f"{seed} {number}")
    names, weights = list(target.EDITS), [weight for _, weight in target.EDITS.values()]
    count = chance.choice(NUM_EDITS)
    edits = tuple((name, chance.getrandbits(32)) for name in chance.choices(names, weights, k=count))
    return Mutant(number, chance.choice(target.bases), edits, chance.choice(target.MENDINGS))


def try_out(target: Target, mutant: Mutant, folder: Path | None = None) -> Outcome:
    """Makes the mutant in `folder`, or in a temporary folder, and runs every command on it."""
    home = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        place = folder or home / "mutant"
        target.copy(mutant.base, place)
        done = tuple(_apply(target.EDITS[name][0], place, random.Random(seed)) for name, seed in mutant.edits)
        target.mend(place, mutant.mending)
        return Outcome(mutant, done, tuple(target.runs(mutant, place, home)))
    finally:
        remove(home)


def _apply(edit: Edit, folder: Path, chance: random.Random) -> str:
    try:
        return edit(folder, chance)
    except (Unfit, TypeError, KeyError, IndexError, ValueError, AttributeError):  # earlier edits left another structure
        return "nothing, it did not apply"


def remove(folder: Path) -> None:
    """Removes a folder of any depth."""
    try:
        shutil.rmtree(folder)
    except (RecursionError, OSError):  # nested deeper than Python recurses or has descriptors
        subprocess.run(["rm", "-rf", "--", folder], check=True)


def smallest(target: Target, outcome: Outcome, failure: Run) -> Outcome:
    """Returns an outcome of the same failure with fewer edits: drops each edit that the failure does not need."""
    best = outcome
    for edit in outcome.mutant.edits[::-1]:
        fewer = tuple(other for other in best.mutant.edits if other != edit)
        found = try_out(target, replace(best.mutant, edits=fewer))
        if any((run.command, run.ended.kind) == (failure.command, failure.ended.kind) for run in found.runs):
            best = found
    return best


_target: Target | None = None
_seed = 0


def _one(number: int) -> Outcome:
    assert _target is not None
    return try_out(_target, draw(_target, _seed, number))


def campaign(target: Target, seed: int, numbers: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """Tries mutants in `jobs` processes and yields their outcomes in order."""
    global _target, _seed
    _target, _seed = target, seed  # workers inherit them by fork
    with get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_one, numbers, chunksize=4)


def copy_tree(source: Path, folder: Path) -> None:
    """Copies a folder and keeps links as links."""
    shutil.copytree(source, folder, symlinks=True)
