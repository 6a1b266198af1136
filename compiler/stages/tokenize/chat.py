"""Renders a corpus's chats as text with the checkpoint's chat template: an untrusted jinja program.

The runtime renders them, in a process with limits (runtime/text/template.py). Here the length of a text is limited as
well. Date and random numbers, which some templates use, are fixed: the same chat gives the same text.
"""

import json
from pathlib import Path
from typing import Any

from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.source_tokenizer import CHAT_TEMPLATE, MAX_SETTINGS_BYTES, SETTINGS
from coldpress.runtime.text.limited import LimitError
from coldpress.runtime.text.template import Rendering, Template, template_in
from coldpress.schemas.errors import ArtifactError, ColdpressError

MAX_GROWTH = 16
"""Characters of text per character of the chat's JSON; a template may add `SPARE_CHARS` to each chat."""
SPARE_CHARS = 1 << 16
TODAY = "2024-07-26"


class ChatTemplate:
    def __init__(self, folder: Path) -> None:
        """`folder` is the private folder that `ingest` made; the template is read with the first chat."""
        self._folder = folder
        self._rendering: Rendering | None = None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Returns a chat's text.

        Raises:
            ColdpressError: if the checkpoint has no template, or it fails, refuses the chat, or reaches a limit.
        """
        rendering = self._rendering = self._rendering or Rendering(read_template(self._folder))
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
    """Reads a checkpoint's template from chat_template.jinja or tokenizer_config.json.

    Raises:
        ColdpressError: if it has none, or several and none called `default`.
    """
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
