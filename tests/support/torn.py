"""What a crash may leave on a disk: a folder's changes are recorded, and replayed on a plain model of a file system.

Recorded is what the folder's tree shows before and after each call that names, creates, removes or syncs something, so
that it does not matter who wrote a file. The model: the bytes of a file are on the disk once it was synced after they
were written; until then they are kept, lost, or cut in half. A change of a folder's entries is there once that folder
was synced; until then it may have happened or not, whatever happened to others before or after it. A rename is one
step, also between two folders; where one of them was synced, the other may still show what it was. A symbolic link is
whole whenever it has a name.
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
"""The number of the folder that is watched; every other file and folder gets the next one when it is first seen."""
MAX_FREE = 4
"""So many changes that are not yet on the disk are kept or lost in every combination; of more, all, none, or each one
alone."""
LINK = b"a symbolic link to "
"""Content of a symbolic link, with its target behind."""
Entry = tuple[int, str]
"""(folder, name in it)."""
State = dict[str, bytes | None]
"""Path -> content, None of a folder."""


@dataclass
class Change:
    """Entries that changed in one step: what each names now, None if nothing."""

    entries: dict[Entry, int | None]


@dataclass
class Written:
    """A file whose bytes are others than when it was looked at last."""

    file: int
    data: bytes


@dataclass
class Synced:
    """A file or a folder that was brought to the disk."""

    what: int


@dataclass
class Recording:
    """What happened below `root` while it was watched."""

    root: Path
    steps: list[Change | Written | Synced] = field(default_factory=list)
    entries: dict[Entry, int] = field(default_factory=dict)
    data: dict[int, bytes | None] = field(default_factory=dict)
    """Number -> bytes of a file, None of a folder."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Inode -> number, of what has a name."""

    def __post_init__(self) -> None:
        """What is there at the beginning is on the disk."""
        self._look()
        self.steps = [Synced(number) for number in self.data]
        self._first = len(self.steps)
        self.before = dict(self.entries), dict(self.data)

    def _look(self) -> tuple[dict[Entry, int | None], dict[int, bytes]]:
        """(entries that changed, files whose bytes did) since the last look."""
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
        """Takes down what has changed; entries one by one, in some order, or as one call changed them."""
        changed, written = self._look()
        for part in [changed] if in_one_step else [{entry: number} for entry, number in changed.items()]:
            if part:
                self.steps.append(Change(part))
        self.steps += [Written(number, data) for number, data in written.items()]

    def note_sync(self, inode: int) -> None:
        """Takes down that something was brought to the disk."""
        if inode in self.numbers:
            self.steps.append(Synced(self.numbers[inode]))


def watch(root: Path, action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Recording:
    """What `action` does below `root`."""
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
    """Each state that a crash at some point may leave, once."""
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
    """What is pending in a folder that was synced is on the disk."""
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
    """The entries on the disk, with some of the pending changes."""
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
    """The tree, with what was not synced kept, lost, and cut in half."""
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
    """Makes `root` what a crash left of it."""
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
    """Path -> content of the files of a folder, or of one file as the path ""."""
    found = {
        path.removeprefix(name).lstrip("/"): data for path, data in state.items() if f"{path}/".startswith(f"{name}/")
    }
    return {path: data for path, data in found.items() if data is not None}


def tree(root: Path) -> State:
    """What is there now."""
    return {path.relative_to(root).as_posix(): _content(path) for path in sorted(root.rglob("*"))}


def _content(path: Path) -> bytes | None:
    """The bytes of a file, `LINK` and the target of a symbolic link; None of a folder."""
    if path.is_symlink():
        return LINK + os.fsencode(os.readlink(path))
    return path.read_bytes() if path.is_file() else None
