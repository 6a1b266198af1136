"""A model profile: which checkpoint a short name stands for, its licence, and the settings that suit it.

The facts that the DAG hangs on (`model_type`, `num_hidden_layers`, `hidden_act`) are stated, so that a dry run, and
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
    """Pinned commit of a hub model; None where no commit is known to hold safetensors, then the user names one."""
    license: str
    model_type: str
    """The value of config.json: a file of compiler/architectures."""
    num_hidden_layers: PositiveCount
    hidden_act: str
    """The value of config.json, as `relu` or `silu`."""
    settings: dict[str, bool | int | float | str] = Field(default={})
    """Defaults of this model, as keys of `--config`, checked by compiler/workflow/settings.py; what the user says goes
    first."""
    notes: str = ""
