"""A model profile: the checkpoint that a short name stands for, its licence, and the settings that suit it.

It states the facts on which the DAG depends (`model_type`, `num_hidden_layers`, `hidden_act`), so that a dry run, and
every cluster job that parses the workflow again, needs no network.
"""

from pydantic import Field

from coldpress.schemas.base import Many, PositiveCount, Record, Sha256
from coldpress.schemas.config import BRANCH_PATTERN, NAME_PATTERN


class PackagePart(Record):
    """A file inside a wheel."""

    package: str = Field(pattern=NAME_PATTERN)
    file: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$")


class Packages(Record):
    """A GGUF file that lies in wheels of the package index, whole or in parts."""

    file: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.gguf$")
    """Name of the joined file."""
    version: str = Field(pattern=NAME_PATTERN)
    """Version of every package."""
    parts: Many[PackagePart] = Field(min_length=1)
    """In the order in which they are joined."""
    size_bytes: PositiveCount
    sha256: Sha256


class ModelProfile(Record):
    """One file of profiles/models."""

    name: str = Field(pattern=NAME_PATTERN)
    """Equal to the file's name."""
    title: str
    source: str = Field(min_length=1)
    """Hub id `owner/name`, or `./folder` from the root of this repository."""
    revision: str | None = Field(default=None, pattern=BRANCH_PATTERN)
    """Commit of a hub model, or the branch that a build pins to a commit; None for a folder."""
    packages: Packages | None = None
    """The same model as packages, which need no account; taken unless the user names a revision of the hub."""
    license: str
    model_type: str
    """The value in config.json: the name of a file of compiler/architectures."""
    num_hidden_layers: PositiveCount
    hidden_act: str
    """The value in config.json, such as `relu` or `silu`."""
    settings: dict[str, bool | int | float | str] = Field(default={})
    """Defaults of this model, as keys of `--config` (compiler/workflow/settings.py); a user's override them."""
    notes: str = ""
