"""Renders a chat as text with the chat template that the artifact carries (runtime/text/template.py)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import JsonError
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.text.limited import LimitError
from coldpress.runtime.text.template import Rendering, Template, template_in
from coldpress.schemas.errors import ArtifactError, ColdpressError, clipped

TEMPLATE_FILE = "tokenizer/chat_template.jinja"
SETTINGS_FILE = "tokenizer/tokenizer_config.json"
MAX_TEMPLATE_BYTES = 1 << 20
Message = Mapping[str, str]
"""`role` and `content`, as in [{"role": "user", "content": "Hello"}]."""


class ChatTemplate:
    def __init__(self, artifact: Artifact) -> None:
        """Reads the template, and checks its digest. Raises `ColdpressError` if there is none, `ArtifactError` if it
        cannot be read."""
        found = _read(artifact)
        if found is None:
            raise ColdpressError(
                "the artifact has no chat template, because its checkpoint had none; give a prompt as text, or put "
                "chat_template.jinja into the checkpoint's folder and build again"
            )
        self._rendering = Rendering(found)

    @classmethod
    def of(cls, artifact: Artifact) -> "ChatTemplate | None":
        return None if _read(artifact) is None else cls(artifact)

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the text of a chat, up to where the assistant's next message begins.

        Its special tokens are part of the text: encode it without adding any. Raises `ColdpressError` if there is no
        message, or the template fails, refuses the chat, or reaches a limit.
        """
        if not messages:
            raise ColdpressError("the chat has no messages, expected at least one; give one of the role 'user'")
        for message in messages:
            if set(message) != {"role", "content"} or not all(map(strict_json.is_encodable, message.values())):
                raise ColdpressError(
                    f"a message of the chat is {clipped(str(dict(message)))}, expected the texts role and content"
                )
        try:
            return self._rendering.render(messages)
        except LimitError as error:
            raise ColdpressError(f"the artifact's chat template {error} for this chat") from error
        except ArtifactError as error:
            raise ArtifactError(f"the artifact's chat template refuses this chat ({error}); change the chat") from error


def tokenizer_settings(artifact: Artifact) -> dict[str, Any]:
    """Reads tokenizer_config.json, strictly; nothing if the artifact has none, or it is no object."""
    if all(entry.path != SETTINGS_FILE for entry in artifact.manifest.files):
        return {}
    data = artifact.read_bytes(SETTINGS_FILE, strict_json.FOREIGN.size_bytes)
    values = strict_json.parse(data, partial(JsonError, SETTINGS_FILE, "the text"), strict_json.FOREIGN)
    return values if strict_json.is_object(values) else {}


def _read(artifact: Artifact) -> Template | None:
    settings, file = tokenizer_settings(artifact), None
    if any(entry.path == TEMPLATE_FILE for entry in artifact.manifest.files):
        file = artifact.read_bytes(TEMPLATE_FILE, MAX_TEMPLATE_BYTES).decode(errors="replace")
    return template_in(settings, file, is_prompt=True)
