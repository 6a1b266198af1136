"""Pins branches of the hub to commits: the first build of a model asks the hub, and its lock file tells later ones.

sources.lock lies in the folder of the model's builds. Who deletes it, or a line of it, takes what the branch is by
then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from coldpress.compiler.checkpoint.hub import REVISION, Kind, commit_of
from coldpress.compiler.io import replacing
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError

LOCK_FILE = "sources.lock"


class SourcesLock(Record):
    """sources.lock."""

    commits: Mapping[str, str]
    """Kind, hub id and branch, as `model owner/name@main` -> the commit that builds use."""


@dataclass
class Pins:
    folder: Path
    """Folder of all builds of the model."""
    locked: bool
    """True if what is not in the lock file is refused."""
    ask: bool
    """True if the hub is asked; a job does not, since the build that started it has."""
    used: dict[str, str] = field(default_factory=dict)
    """Commits as in the lock file."""

    def commit(self, kind: Kind, hub_id: str, revision: str | None, key: str) -> str:
        """Returns the commit of a revision of the hub, None for its main branch; `key` of `--config` names it in the
        refusal. Raises ColdpressError if it is not pinned and must be, or the hub does not tell."""
        branch = revision or "main"
        if REVISION.fullmatch(branch):
            return branch
        name = f"{kind} {hub_id}@{branch}"
        found = read_lock(self.folder).get(name)
        if found is None and self.locked:
            raise ColdpressError(
                f"locked=true, and no commit is pinned for {branch} of the {kind} {hub_id}: {self.folder / LOCK_FILE} "
                f"does not have it; give {key}=<40 hexadecimal digits>, or build once without locked"
            )
        if found is None and not self.ask:
            return branch
        self.used[name] = found or commit_of(hub_id, branch, kind)
        return self.used[name]


def read_lock(folder: Path) -> Mapping[str, str]:
    """Returns the pinned commits of the builds in a folder, as in the lock file; nothing if there is none. Raises
    ColdpressError if the file is none."""
    file = folder / LOCK_FILE
    try:
        return SourcesLock.model_validate_json(file.read_bytes()).commits
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise ColdpressError(
            f"{file} cannot be read as a lock file; restore it, or delete it to take what the branches are now"
        ) from error


def keep(folder: Path, used: Mapping[str, str]) -> list[str]:
    """Adds commits to the lock file; returns a line for the user for each new one."""
    known = read_lock(folder)
    new = {name: commit for name, commit in used.items() if name not in known}
    if new:
        with replacing(folder / LOCK_FILE) as temporary:
            commits = dict(sorted({**known, **new}.items()))
            temporary.write_text(SourcesLock(commits=commits).to_json(), encoding="utf-8")
    return [f"{name} is commit {commit}, kept in {folder / LOCK_FILE}" for name, commit in new.items()]
