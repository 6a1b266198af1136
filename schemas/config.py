"""Marks fields of settings records as keys that a user may give: `snakemake --config key=value`.

A key is declared once, in the settings record of its stage (`compiler/<stage>`) or in the `Options` of its plug-in.
Rules, checks, schemas/json/config.schema.json and the README's table are made from those records
(compiler/workflow/keys.py).
"""

from dataclasses import dataclass

NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
"""Names that become folders of the build: no separators, no leading or trailing dot or dash."""
BRANCH_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,99}$"
"""A commit, branch or tag of the hub; a build pins it to a commit."""


@dataclass(frozen=True)
class Key:
    """Marks a field as a key of `--config`: `Annotated[int, Key()]`. Field, key and flag have one name."""

    plugins: str = ""
    """Package whose plug-ins are the values, such as `coldpress.runtime.cache`; empty: the field's type has them."""
    joint: bool = False
    """True if several plug-ins' names with `+` between are a value, too."""
    auto: bool = False
    """True if `auto` is a value, too; the workflow resolves it before a stage sees it."""
    default: str = ""
    """A description of the default, if the workflow derives it; empty: the field's default."""


@dataclass(frozen=True)
class OptionsOf:
    """Marks a field as the options of the plug-in that another field names: `Annotated[dict[…], OptionsOf("method")]`.

    The options are the fields of the plug-in's `OPTIONS`, a frozen record with a default for every field. Each of them
    is a key of `--config` in builds that chose the plug-in.
    """

    field: str
