"""Mutants by number, their trial, and the smallest list of edits that still fails.

A mutant is a function of the seed and its number: a base, one to four edits, and what is made consistent again behind
them. An edit draws from a source of its own, so that leaving out one edit changes nothing about the others but the
state that they find.
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
"""Changes a folder; says what it did."""
NUM_EDITS = (1, 1, 1, 2, 2, 3, 4)
SILENT = "silent"
"""Damage that nothing notices: not one of the classes, but as bad."""


@dataclass(frozen=True)
class Mutant:
    """What is done to which base."""

    number: int
    base: str
    edits: tuple[tuple[str, int], ...]
    """Name of an edit, and the seed of what it draws."""
    mending: str
    """What is made consistent again: one of the target's `MENDINGS`."""


@dataclass(frozen=True)
class Run:
    """One command on a mutant."""

    command: str
    ended: Ended

    @property
    def failed(self) -> bool:
        """Whether it ended as nothing may."""
        return self.ended.kind in (*BAD, SILENT)


@dataclass(frozen=True)
class Outcome:
    """A mutant and how all commands ended on it."""

    mutant: Mutant
    done: tuple[str, ...]
    """What each edit did."""
    runs: tuple[Run, ...]


class Target(Protocol):
    """What is mutated, and what must stand it."""

    EDITS: Mapping[str, tuple[Edit, int]]
    """Name -> edit and how often it is drawn."""
    MENDINGS: Sequence[str]
    bases: Sequence[str]

    def copy(self, base: str, folder: Path) -> None:
        """Makes `folder` a copy of a base."""
        ...

    def mend(self, folder: Path, mending: str) -> None:
        """Makes digests consistent again."""
        ...

    def runs(self, mutant: Mutant, folder: Path, scratch: Path) -> Iterator[Run]:
        """Every command on the mutant in `folder`, one after another."""
        ...


def draw(target: Target, seed: int, number: int) -> Mutant:
    """Mutant `number` of a seed."""
    chance = random.Random(f"{seed} {number}")
    names, weights = list(target.EDITS), [weight for _, weight in target.EDITS.values()]
    count = chance.choice(NUM_EDITS)
    edits = tuple((name, chance.getrandbits(32)) for name in chance.choices(names, weights, k=count))
    return Mutant(number, chance.choice(target.bases), edits, chance.choice(target.MENDINGS))


def try_out(target: Target, mutant: Mutant, folder: Path | None = None) -> Outcome:
    """Makes the mutant and runs every command on it; in `folder`, which stays, or in one that goes."""
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
    except (Unfit, TypeError, KeyError, IndexError, ValueError, AttributeError):  # what an edit before it has left
        return "nothing, it did not apply"


def remove(folder: Path) -> None:
    """Removes a folder of any depth."""
    try:
        shutil.rmtree(folder)
    except (RecursionError, OSError):  # folders nested deeper than Python goes, or than a process has descriptors
        subprocess.run(["rm", "-rf", "--", folder], check=True)


def smallest(target: Target, outcome: Outcome, failure: Run) -> Outcome:
    """The same failure with as few edits as leave it: each is left out if it goes on without."""
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
    """The outcomes of the mutants, in order."""
    global _target, _seed
    _target, _seed = target, seed  # what the workers are forked with
    with get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_one, numbers, chunksize=4)


def copy_tree(source: Path, folder: Path) -> None:
    """A copy with links as they are."""
    shutil.copytree(source, folder, symlinks=True)
