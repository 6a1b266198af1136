"""Lists the states that a crash may leave on a disk: records changes and replays them on a model of a file system.

The tree is looked at before and after each call that creates, names, removes or syncs something, so that it does not
matter who wrote a file. The model: a file's bytes are on the disk once the file is synced after the write; until then a
crash keeps them, loses them, or cuts them in half. A change of a folder's entries is on the disk once the folder is
synced; until then a crash may lose it, independently of earlier and later changes. A rename is one step, also between
two folders; if only one of them was synced, the other may still show its old entry. A symbolic link is never cut.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from coldpress.compiler import publishing

ROOT = 0
"""The number of the watched folder; every other file and folder gets the next number when it is first seen."""
MAX_FREE = 4
"""Up to this many pending changes are kept or lost in every combination; of more, all, none, only one, or all but one
are kept."""
LINK = b"a symbolic link to "
"""Prefix of a symbolic link's content; its target follows."""
Entry = tuple[int, str]
"""(folder, name in it)."""
State = dict[str, bytes | None]
"""Path -> content, None for a folder."""


@dataclass
class Change:
    """Entries that changed in one step, each with the number that it names now, None if it was removed."""

    entries: dict[Entry, int | None]


@dataclass
class Written:
    """A file whose bytes have changed since the last look."""

    file: int
    data: bytes


@dataclass
class Synced:
    """A file or folder that was synced."""

    what: int


@dataclass
class Recording:
    """The steps that happened below `root` while it was watched."""

    root: Path
    steps: list[Change | Written | Synced] = field(default_factory=list)
    entries: dict[Entry, int] = field(default_factory=dict)
    data: dict[int, bytes | None] = field(default_factory=dict)
    """Number -> bytes of a file, None for a folder."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Inode -> number of each file and folder that has a name."""

    def __post_init__(self) -> None:
        """Counts everything that exists at the beginning as synced."""
        self._look()
        self.steps = [Synced(number) for number in self.data]
        self._first = len(self.steps)
        self.before = dict(self.entries), dict(self.data)

    def _look(self) -> tuple[dict[Entry, int | None], dict[int, bytes]]:
        """Looks at the tree; returns (entries that changed, files whose bytes changed) since the last look."""
        numbers, entries = {os.stat(self.root).st_ino: ROOT}, dict[Entry, int]()
        data: dict[int, bytes | None] = {ROOT: None}
        for parent, folders, files in os.walk(self.root):
            folder = numbers[os.stat(parent).st_ino]
            for name in sorted((*folders, *files)):
                path = os.path.join(parent, name)
                inode = os.lstat(path).st_ino
                number = numbers[inode] = self.numbers.get(inode) or 1 + max((*self.data, *data))
                entries[folder, name] = number
                data[number] = _content(Path(path))
        changed = {entry: entries.get(entry) for entry in sorted({*entries, *self.entries})}
        changed = {entry: number for entry, number in changed.items() if number != self.entries.get(entry)}
        written = {
            number: found for number, found in data.items() if found is not None and found != self.data.get(number)
        }
        self.entries, self.numbers, self.data = entries, numbers, self.data | data
        return changed, written

    def note(self, in_one_step: bool) -> None:
        """Records the changes since the last look: entries as one step, or each as a step of its own."""
        changed, written = self._look()
        for part in [changed] if in_one_step else [{entry: number} for entry, number in changed.items()]:
            if part:
                self.steps.append(Change(part))
        self.steps += [Written(number, data) for number, data in written.items()]

    def note_sync(self, inode: int) -> None:
        """Records that a file or folder was synced."""
        if inode in self.numbers:
            self.steps.append(Synced(self.numbers[inode]))


def watch(root: Path, action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Runs `action` and returns the steps that it made below `root`."""
    recording, lock = Recording(root), threading.RLock()

    def watched(function: Callable[..., Any], inode_of: Callable[..., int] | None = None) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with lock:
                recording.note(in_one_step=False)
                try:
                    return function(*arguments, **named)
                finally:
                    recording.note(in_one_step=True)
                    if inode_of:
                        recording.note_sync(inode_of(*arguments))

        return call

    with monkeypatch.context() as patched:
        for name in ("open", "mkdir", "rename", "replace", "link", "symlink", "unlink", "rmdir"):
            patched.setattr(os, name, watched(getattr(os, name)))
        patched.setattr(os, "fsync", watched(os.fsync, lambda descriptor: os.fstat(descriptor).st_ino))
        patched.setattr(publishing, "_exchange", watched(publishing._exchange))
        action()
        recording.note(in_one_step=False)
    return recording


def states(recording: Recording) -> Iterator[State]:
    """Yields each state that a crash at some point may leave, once."""
    seen: set[int] = set()
    disk, pending = dict(recording.before[0]), list[dict[Entry, int | None]]()
    stored: dict[int, bytes | None] = dict(recording.before[1])
    current = dict(stored)
    for step in (None, *recording.steps):
        if isinstance(step, Change):
            pending.append(dict(step.entries))
            for number in step.entries.values():
                current.setdefault(number, recording.data[number] and b"") if number is not None else None
        elif isinstance(step, Written):
            current[step.file] = step.data
        elif isinstance(step, Synced):
            stored[step.what] = current.get(step.what)
            _settle(step.what, disk, pending)
        for entries in _combinations(disk, pending):
            for state in _contents(entries, current, stored):
                key = hash(tuple(sorted(state.items(), key=lambda item: item[0])))
                if key not in seen:
                    seen.add(key)
                    yield state


def _settle(folder: int, disk: dict[Entry, int], pending: list[dict[Entry, int | None]]) -> None:
    """Applies the pending changes of a synced folder to the disk."""
    for change in pending:
        for entry in [entry for entry in change if entry[0] == folder]:
            _apply(disk, {entry: change.pop(entry)})
    pending[:] = [change for change in pending if change]


def _apply(disk: dict[Entry, int], change: Mapping[Entry, int | None]) -> None:
    for entry, number in change.items():
        if number is None:
            disk.pop(entry, None)
        else:
            disk[entry] = number


def _combinations(disk: dict[Entry, int], pending: list[dict[Entry, int | None]]) -> Iterator[dict[Entry, int]]:
    """Yields the entries on the disk with each choice of pending changes."""
    count = len(pending)
    if count <= MAX_FREE:
        choices = list(product((False, True), repeat=count))
    else:
        alone = [tuple(place == number for place in range(count)) for number in range(count)]
        choices = [(False,) * count, (True,) * count, *alone, *(tuple(not kept for kept in one) for one in alone)]
    for choice in choices:
        entries = dict(disk)
        for change, kept in zip(pending, choice, strict=True):
            if kept:
                _apply(entries, change)
        yield entries


def _contents(
    entries: dict[Entry, int], current: Mapping[int, bytes | None], stored: Mapping[int, bytes | None]
) -> Iterator[State]:
    """Yields the tree with unsynced bytes kept, lost, and cut in half."""
    for unsynced in ("kept", "lost", "cut"):
        state: State = {}
        folders = [(ROOT, "")]
        for folder, path in folders:
            for (parent, name), number in entries.items():
                if parent == folder:
                    now = current.get(number)
                    if now is None:
                        folders.append((number, f"{path}{name}/"))
                        state[f"{path}{name}"] = None
                    elif now == stored.get(number) or unsynced == "kept" or now.startswith(LINK):
                        state[f"{path}{name}"] = now
                    else:
                        state[f"{path}{name}"] = (
                            (stored.get(number) or b"") if unsynced == "lost" else now[: len(now) // 2]
                        )
        yield state


def restore(state: State, root: Path) -> None:
    """Makes `root` the tree of a state."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for path, data in sorted(state.items()):
        if data is None:
            (root / path).mkdir()
        elif data.startswith(LINK):
            (root / path).symlink_to(data.removeprefix(LINK).decode())
        else:
            (root / path).write_bytes(data)


def below(state: State, name: str) -> dict[str, bytes]:
    """Returns path -> content of the files of a folder, or of one file as the path ""."""
    found = {
        path.removeprefix(name).lstrip("/"): data for path, data in state.items() if f"{path}/".startswith(f"{name}/")
    }
    return {path: data for path, data in found.items() if data is not None}


def tree(root: Path) -> State:
    """Returns the state of a folder now."""
    return {path.relative_to(root).as_posix(): _content(path) for path in sorted(root.rglob("*"))}


def _content(path: Path) -> bytes | None:
    """Returns the bytes of a file, `LINK` and the target for a symbolic link, None for a folder."""
    if path.is_symlink():
        return LINK + os.fsencode(os.readlink(path))
    return path.read_bytes() if path.is_file() else None
