"""Turns a record of a corpus into one text: finds the fields that hold the text and joins them.

A list of messages is a chat and goes through the checkpoint's own template, an untrusted jinja program, which the
runtime renders in a process with limits (runtime/text/template.py). Here the length of a text is limited as well. Date
and random numbers, which some templates use, are fixed: the same chat gives the same text.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.source_tokenizer import CHAT_TEMPLATE, MAX_SETTINGS_BYTES, SETTINGS
from coldpress.runtime.text.limited import LimitError
from coldpress.runtime.text.template import Rendering, Template, template_in
from coldpress.schemas.errors import ArtifactError, ColdpressError

LAYOUTS = (
    ("text",),
    ("story",),
    ("content",),
    ("messages",),
    ("conversations",),
    ("instruction", "input?", "output"),
    ("instruction", "context?", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
)
"""Fields whose values make up a text, in this order; fields with a question mark may be missing or empty."""
SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
"""Roles of messages that have `from` and `value` instead of `role` and `content`."""
GLUE = "\n\n"
HALF_PAIR = re.compile("[\ud800-\udfff]")
TASK_FIELD = "task"
"""Optional field of a record that names the task of its text."""
MAX_TASK_CHARS = 100
MAX_SHOWN_CHARS = 200
Messages = list[dict[str, Any]]
MAX_GROWTH = 16
"""Characters of text per character of the chat's JSON; a template may add `SPARE_CHARS` to each chat."""
SPARE_CHARS = 1 << 16
TODAY = "2024-07-26"


def no_chats(messages: Messages) -> str:
    """Refuses chats; used where no template exists."""
    raise ColdpressError("the record is a chat, and there is no template for one here")


@dataclass
class TextRows:
    fields: tuple[str, ...] = ()
    """Fields to read; empty: those of the first known layout."""
    render: Callable[[Messages], str] = no_chats
    tasks: dict[str, str] = field(default_factory=dict)
    """Text of each record that names a task -> the task's name."""
    layouts: Counter[str] = field(default_factory=Counter)
    """Fields that were read -> number of records."""

    def text(self, place: str, row: Any) -> str:
        """Returns the text of a record, or raises a ColdpressError with the place, the fields found and the key to
        give."""
        if isinstance(row, str) and not self.fields:
            names, text = ("a text",), row
        else:
            if not isinstance(row, Mapping):
                raise ColdpressError(f"{place}: the record is {_kind(row)}, expected an object with fields of text")
            names = self._names(place, row)
            text = self._joined(place, {name: row[name] for name in names})
        if HALF_PAIR.search(text):
            raise ColdpressError(f"{place}: the text holds half a surrogate pair, expected whole characters")
        self.layouts["+".join(names)] += 1
        task = row.get(TASK_FIELD) if isinstance(row, Mapping) else None
        if isinstance(task, str) and task.strip() and text not in self.tasks:
            self.tasks[text] = task.strip()[:MAX_TASK_CHARS]
        return text

    def columns(self, place: str, names: Sequence[str]) -> list[str]:
        """Returns the columns to read from a table with the fields `names`, whose first row has the place `place`.
        Raises ColdpressError if no column is known to hold text."""
        wanted = {*self._names(place, dict.fromkeys(names, "")), TASK_FIELD}
        return [name for name in names if name in wanted]

    def _names(self, place: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        for layout in [] if self.fields else LAYOUTS:
            if all(name.endswith("?") or name in row for name in layout):
                return tuple(name.removesuffix("?") for name in layout if name in row or row.get(name[:-1]) is not None)
        if self.fields and row.keys() >= set(self.fields):
            return self.fields
        found = ", ".join(map(str, row)) or "none"
        found = found if len(found) <= MAX_SHOWN_CHARS else f"{found[:MAX_SHOWN_CHARS]}… ({len(row)} in all)"
        if self.fields:
            missing = next(name for name in self.fields if name not in row)
            raise ColdpressError(f"{place}: the record has no field {missing} (corpus_field), found {found!r}")
        raise ColdpressError(
            f"{place}: no field of the record is known to hold text, found {found!r}; name the field with "
            "corpus_field=<field>, or several with corpus_field=<one>+<another>"
        )

    def _joined(self, place: str, values: Mapping[str, Any]) -> str:
        if all(isinstance(value, list) for value in values.values()):
            messages = [_message(place, message) for value in values.values() for message in value]
            try:
                return self.render(messages)
            except ColdpressError as error:
                raise ColdpressError(f"{place}: {error}") from error
        for name, value in values.items():
            if not isinstance(value, str):
                raise ColdpressError(
                    f"{place}: the field {name} is {_kind(value)}, expected text or a list of messages; name another "
                    "with corpus_field"
                )
        return GLUE.join(value for value in values.values() if value.strip())


def _message(place: str, message: Any) -> dict[str, Any]:
    if isinstance(message, Mapping) and message.get("from") in SPEAKERS and isinstance(message.get("value"), str):
        return {"role": SPEAKERS[message["from"]], "content": message["value"]}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        found = f"the keys {', '.join(map(str, message))[:MAX_SHOWN_CHARS]!r}"
        found = found if isinstance(message, Mapping) else _kind(message)
        raise ColdpressError(
            f"{place}: a message of the chat has {found}, expected role and content, or from and value"
        )
    return {str(key): value for key, value in message.items() if value is not None}


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


class ChatTemplate:
    def __init__(self, folder: Path) -> None:
        """`folder` is the private folder that `ingest` made."""
        self._folder = folder

    @cached_property
    def _rendering(self) -> Rendering:
        return Rendering(read_template(self._folder))

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Returns a chat's text. Raises ColdpressError if the checkpoint has no template, or it fails, refuses the
        chat, or reaches a limit."""
        rendering = self._rendering
        try:
            text = rendering.render(messages)
        except LimitError as error:
            raise ColdpressError(
                f"the checkpoint's chat template {error} for this chat; give another template"
            ) from error
        except ArtifactError as error:
            raise _refused(str(error)) from error
        num_chars = len(json.dumps(messages))
        most = MAX_GROWTH * num_chars + SPARE_CHARS
        if len(text) > most:
            raise _refused(f"{num_chars} characters became {len(text)}, expected at most {most}")
        return text


def _refused(reason: str) -> ColdpressError:
    return ColdpressError(
        f"the checkpoint's chat template refuses this chat ({reason}); leave the record out, or name another field "
        "with corpus_field"
    )


def read_template(folder: Path) -> Template:
    """Reads a checkpoint's template from chat_template.jinja or tokenizer_config.json. Raises ColdpressError if it has
    none, or several and none called `default`."""
    settings = read_object(folder / SETTINGS, MAX_SETTINGS_BYTES) if (folder / SETTINGS).is_file() else {}
    path = folder / CHAT_TEMPLATE
    file = path.read_text(encoding="utf-8") if path.is_file() else None
    found = template_in(settings, file, is_prompt=False, today=TODAY)
    if found is None:
        raise ColdpressError(
            f"the record is a chat, and the checkpoint has no chat template; put {CHAT_TEMPLATE} into its folder, or "
            "name a field of text with corpus_field"
        )
    return found
