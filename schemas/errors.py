"""The errors a user may see. Each is one sentence: what was found, what was expected, where, and the remedy."""

import difflib
from collections.abc import Iterable


class ColdpressError(Exception):
    """Bad input of any kind; the command line prints it as one sentence and exits with code 2."""


class UnknownNameError(ColdpressError):
    """A name that is not among the known ones; the text gives the nearest one and all choices."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        """`kind` is the field's word for what is named, such as `device`."""
        choices = sorted(known)
        begins = [choice for choice in choices if name and choice.startswith(name)]  # int4, for int4_group32
        near = difflib.get_close_matches(name, choices, n=1) or begins
        hint = f" Did you mean '{near[0]}'?" if near else ""
        super().__init__(f"unknown {kind} '{name}'.{hint} Known: {', '.join(choices) or 'none'}.")


class DoesNotFitError(ColdpressError):
    """Something needs more memory or disk than there is; the text gives both numbers."""


class CheckpointError(ColdpressError):
    """A checkpoint that cannot be compiled: missing, truncated, inconsistent, unsafe or unsupported."""


class ArtifactError(ColdpressError):
    """An artifact that is damaged, hostile or of another format version."""


class CorruptPageError(ArtifactError):
    """A page of flash.img whose checksum differs."""
