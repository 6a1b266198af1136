"""A model profile: the checkpoint that a short name stands for, its licence, and the settings that suit it.

It states the facts on which the DAG depends (`model_type`, `num_hidden_layers`, `hidden_act`), so that a dry run, and
every cluster job that parses the workflow again, needs no network.
"""

from pydantic import Field

from coldpress.schemas.base import PositiveCount, Record
from coldpress.schemas.config import NAME_PATTERN, REVISION_PATTERN


class ModelProfile(Record):
    """One file of profiles/models."""

    name: str = Field(pattern=NAME_PATTERN)
    """Equal to the file's name."""
    title: str
    source: str = Field(min_length=1)
    """Hub id `owner/name`, or `./folder` from the root of this repository."""
    revision: str | None = Field(default=None, pattern=REVISION_PATTERN)
    """Pinned commit of a hub model; None if no commit is known to hold safetensors: then the user names one."""
    license: str
    model_type: str
    """The value in config.json: the name of a file of compiler/architectures."""
    num_hidden_layers: PositiveCount
    hidden_act: str
    """The value in config.json, such as `relu` or `silu`."""
    settings: dict[str, bool | int | float | str] = Field(default={})
    """Defaults of this model, as keys of `--config`, checked by compiler/workflow/settings.py; the user's settings
    override them."""
    notes: str = ""
