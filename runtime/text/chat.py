"""Renders a chat as text with the chat template that the artifact carries: a stranger's jinja program.

It runs in jinja's sandbox, which blocks everything except the use of time and memory; so it also runs in a separate
process with limits (runtime/text/limited.py). The template sees what transformers gives it: `messages`, the special
tokens by name, `add_generation_prompt`, and the functions `raise_exception` and `strftime_now`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import JsonError
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.text.limited import LimitedProcess, LimitError, serve
from coldpress.schemas.errors import ArtifactError, ColdpressError, clipped

TEMPLATE_FILE = "tokenizer/chat_template.jinja"
SETTINGS_FILE = "tokenizer/tokenizer_config.json"
MAX_TEMPLATE_BYTES = 1 << 20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
Message = Mapping[str, str]
"""`role` and `content`, as in [{"role": "user", "content": "Hello"}]."""


class ChatTemplate:
    """An artifact's chat template; the process that renders it starts with the first chat."""

    cpu_s = 5
    """Processor seconds for a short chat."""

    def __init__(self, artifact: Artifact) -> None:
        """Reads the template, and checks its digest.

        Raises:
            ColdpressError: if the artifact has none.
            ArtifactError: if it cannot be read.
        """
        found, settings = _read(artifact)
        if found is None:
            raise ColdpressError(
                "the artifact has no chat template, because its checkpoint had none; give a prompt as text, or put "
                "chat_template.jinja into the checkpoint's folder and build again"
            )
        texts = {name: _text_of(settings.get(name)) for name in SPECIAL_TOKENS}
        tokens = {name: text for name, text in texts.items() if text is not None}
        self._first = json.dumps([found, tokens]).encode()
        self._limited: LimitedProcess | None = None

    @classmethod
    def of(cls, artifact: Artifact) -> "ChatTemplate | None":
        """Opens the artifact's template; returns None if it has none."""
        return None if _read(artifact)[0] is None else cls(artifact)

    def render(self, messages: Sequence[Message]) -> str:
        """Returns the text of a chat, up to where the assistant's next message begins.

        Its special tokens are part of the text: encode it without adding any.

        Raises:
            ColdpressError: if there is no message, or the template fails, refuses the chat, or reaches a limit.
        """
        if not messages:
            raise ColdpressError("the chat has no messages, expected at least one; give one of the role 'user'")
        for message in messages:
            if set(message) != {"role", "content"} or not all(map(strict_json.is_encodable, message.values())):
                raise ColdpressError(
                    f"a message of the chat is {clipped(str(dict(message)))}, expected the texts role and content"
                )
        try:
            if self._limited is None:
                limited = LimitedProcess("coldpress.runtime.text.chat", self.cpu_s)
                limited.ask(self._first)
                self._limited = limited
            return self._limited.ask(json.dumps([dict(message) for message in messages]).encode())
        except LimitError as error:
            self._limited = None  # the next chat starts another process
            raise ColdpressError(f"the artifact's chat template took more than {error} for this chat") from error


def _read(artifact: Artifact) -> tuple[str | None, dict[str, Any]]:
    """Returns the template, None without one, and the settings of the tokenizer."""
    names = {entry.path for entry in artifact.manifest.files}
    settings = dict[str, Any]()
    if SETTINGS_FILE in names:
        data = artifact.read_bytes(SETTINGS_FILE, strict_json.FOREIGN.size_bytes)
        values = strict_json.parse(data, partial(JsonError, SETTINGS_FILE, "the text"), strict_json.FOREIGN)
        settings = values if strict_json.is_object(values) else settings
    if TEMPLATE_FILE in names:
        return artifact.read_bytes(TEMPLATE_FILE, MAX_TEMPLATE_BYTES).decode(errors="replace"), settings
    found = _default(settings.get("chat_template"))
    return (found if isinstance(found, str) else None), settings


def _default(found: Any) -> Any:
    """Returns the template of tokenizer_config.json; of several named ones the one called `default`."""
    if not strict_json.is_array(found):
        return found
    named = [entry for entry in found if strict_json.is_object(entry) and entry.get("name") == "default"]
    return named[0].get("template") if named else None


def _text_of(token: Any) -> str | None:
    text = token.get("content") if strict_json.is_object(token) else token
    return text if isinstance(text, str) else None


# The other side


class _Rendering:
    def __init__(self) -> None:
        self._template: Any = None
        self._tokens: dict[str, str] = {}

    def answer(self, frame: bytes) -> Any:
        try:
            if self._template is None:
                text, self._tokens = json.loads(frame)
                self._template = compiled(text)
                return None
            return self._template.render(messages=json.loads(frame), add_generation_prompt=True, **self._tokens)
        except MemoryError:
            raise
        except Exception as error:  # jinja's errors, or any that the template's expressions raise
            reason = clipped(" ".join(f"{type(error).__name__}: {error}".split()))
            raise ArtifactError(
                f"the artifact's chat template refuses this chat ({reason}); change the chat"
            ) from error


def compiled(text: str) -> Any:
    """Compiles a template in jinja's sandbox, with the filters, functions and tags that transformers offers."""
    import jinja2
    from jinja2 import ext, nodes, parser, sandbox, utils

    class Generation(ext.Extension):
        """Writes what is between the tags `generation` and `endgeneration`, which mark text for training."""

        tags = {"generation"}  # noqa: RUF012 - jinja declares it so

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(utils.Namespace):
        """Jinja's own, without names through which a template reaches the interpreter."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                refused(f"a namespace may not have the name {name!r}")
            super().__setitem__(name, value)

    def refused(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **settings)  # jinja's own escapes characters of HTML

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment: Any = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refused, "strftime_now": strftime_now, "namespace": Namespace}
    return environment.from_string(text)


if __name__ == "__main__":
    serve(_Rendering().answer)
