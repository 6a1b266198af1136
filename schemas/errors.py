"""The errors a user may see. Each is one sentence: what was found, what was expected, where, and the remedy."""

import difflib
from collections.abc import Iterable
from typing import Any, TypeVar

Name = TypeVar("Name", bound=str)


def printable(text: str) -> str:
    """Returns `text` on one line, unprintable characters escaped: a stranger's name moves no terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def clipped(text: str, limit: int = 200) -> str:
    """Returns `text`, or, if it is too long, its beginning and its length, in about `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 20]}... ({len(text)} characters)"


class ColdpressError(Exception):
    """Bad input of any kind; the command line prints it as one sentence and exits with code 2."""

    def __init__(self, text: str) -> None:
        """`text` is the sentence; it may contain a stranger's names."""
        super().__init__(printable(text))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the text and the attributes: a subclass may take other arguments than the text, and its errors, too,
        come back from a pool of processes."""
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[ColdpressError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ColdpressError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


MOST_LISTED = 40
"""Choices that are listed although there is a near one."""


class UnknownNameError(ColdpressError):
    """A name that is not among the known ones; the text gives the nearest one, and all choices where they are few."""

    def __init__(self, kind: str, name: str, known: Iterable[str], other: str = "") -> None:
        """`kind` says what the name is for, such as `device`; `other` names another choice in a phrase."""
        choices, name = sorted(known), clipped(name)
        begins = [choice for choice in choices if name and choice.startswith(name)]  # such as int4 for int4_group32
        near = difflib.get_close_matches(name, choices, n=1) or begins
        hint = f" Did you mean '{near[0]}'?" if near else ""
        listed = "" if near and len(choices) > MOST_LISTED else f" Known: {', '.join(choices) or 'none'}"
        super().__init__(
            f"unknown {kind} '{name}'.{hint}{listed}{other and ' '}{other}{'.' if listed or other else ''}"
        )


def known_name(kind: str, name: str, known: Iterable[Name]) -> Name:
    """Returns `name` as an element of `known`; raises UnknownNameError, whose `kind` it is, if it is none."""
    choices = tuple(known)
    for choice in choices:
        if name == choice:
            return choice
    raise UnknownNameError(kind, name, choices)


class DoesNotFitError(ColdpressError):
    """Something needs more memory or disk than available; the text gives both numbers."""


class CheckpointError(ColdpressError):
    """A checkpoint that cannot be compiled: missing, truncated, inconsistent, unsafe or unsupported."""


class ArtifactError(ColdpressError):
    """An artifact that is damaged, hostile or of another format version."""


class CorruptPageError(ArtifactError):
    """A page of flash.img whose checksum differs."""


NO_THREAD = "may not start another thread; allow more processes and threads (ulimit -u), or free some memory"
"""Text of a command, behind its name, where `is_refused_thread`."""


def is_refused_thread(error: RuntimeError) -> bool:
    """Returns whether the system refused a thread: Python and the native core raise it without an error number."""
    return str(error) in ("can't start new thread", "Resource temporarily unavailable")
