"""Renders a chat as text with a chat template, a stranger's jinja program: that of an artifact, or of a checkpoint.

It runs in jinja's sandbox, which blocks everything except the use of time and memory; so it also runs in a separate
process with limits (runtime/text/limited.py). The template sees what transformers gives it: `messages`, the special
tokens by name, `add_generation_prompt`, no `tools` and `documents`, and the functions `raise_exception` and
`strftime_now`.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.text.limited import LimitedProcess, serve
from coldpress.schemas.errors import ColdpressError, clipped

CPU_S = 5
"""Processor seconds for a short chat."""


@dataclass(frozen=True)
class Template:
    text: str
    tokens: Mapping[str, str]
    """Special tokens by name."""
    is_prompt: bool
    """True if the text ends where the assistant's next message begins."""
    today: str | None = None
    """A date, as 2024-07-26, that the template sees; then random numbers are fixed, too. None: the real ones."""


def template_in(settings: Mapping[str, Any], file: str | None, **how: Any) -> Template | None:
    """Returns the template of tokenizer_config.json's values, unless a file of its own holds it; None without one. Of
    several templates the one named `default` is taken. `how` are other fields of the template."""
    text = _default(settings.get("chat_template")) if file is None else file
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    extra = settings.get("extra_special_tokens")
    named |= extra if strict_json.is_object(extra) else {}
    texts = {name: text_of(value) for name, value in named.items()}
    tokens = {name: text for name, text in texts.items() if text is not None}
    return Template(text, tokens, **how) if isinstance(text, str) else None


class Rendering:
    """Renders chats, one after another; its process starts with the first one."""

    def __init__(self, template: Template) -> None:
        self._template = json.dumps(asdict(template)).encode()
        self._limited: LimitedProcess | None = None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the text of a chat. Raises `LimitError` if the template reaches a limit, `ArtifactError` with its
        reason if it fails or refuses the chat."""
        if self._limited is None:
            self._limited = LimitedProcess("coldpress.runtime.text.template", CPU_S)
            self._limited.begin(self._template)
        return self._limited.ask(json.dumps([dict(message) for message in messages]).encode())


def _default(found: Any) -> Any:
    if not strict_json.is_array(found):
        return found
    named = [entry for entry in found if strict_json.is_object(entry) and entry.get("name") == "default"]
    return named[0].get("template") if named else None


def text_of(token: Any) -> str | None:
    """Returns the text of a special token, which may have flags; None if it is none."""
    text = token.get("content") if strict_json.is_object(token) else token
    return text if isinstance(text, str) else None


# The other side

Messages = Sequence[Mapping[str, Any]]


class _TemplateAnswers:
    def __init__(self) -> None:
        self._given: Template | None = None
        self._compiled: Any = None

    def answer(self, frame: bytes) -> Any:
        try:
            if self._given is None:
                self._given = Template(**json.loads(frame))
                self._compiled = compiled(self._given)
                return None
            return self._chat(json.loads(frame))
        except (MemoryError, ColdpressError):
            raise
        except Exception as error:  # jinja's errors, or any that the template's expressions raise
            raise ColdpressError(clipped(" ".join(f"{type(error).__name__}: {error}".split()))) from error

    def _chat(self, messages: Messages) -> str:
        """Renders a chat whose contents are texts; as lists of parts, which templates of multimodal families walk over,
        if fewer of them are lost so."""
        contents = [content for each in messages if isinstance(content := each.get("content"), str)]
        texts = [text for content in contents if (text := content.strip())]
        lost, text = self._tried(messages, texts)
        form = messages
        if lost:
            in_parts = [_with_content(each, [{"type": "text", "text": each["content"]}]) for each in messages]
            lost_so, text_so = self._tried(in_parts, texts)
            if lost_so < lost:
                lost, text, form = lost_so, text_so, in_parts
        if isinstance(text, Exception):
            raise text
        if lost and (users := [place for place, each in enumerate(messages) if each.get("role") == "user"]):
            self._check(form, users[-1], text)
        return text

    def _tried(self, messages: Messages, texts: Sequence[str]) -> tuple[int, str | Exception]:
        """Returns how many of `texts` the rendered chat has lost, and the chat; or the failure."""
        try:
            found = self._text(messages)
        except MemoryError:
            raise
        except Exception as error:
            return len(texts) + 1, error
        return sum(each not in found for each in texts), found

    def _check(self, messages: Messages, place: int, text: str) -> None:
        """Refuses a template that gives the same `text` whatever the message at `place` says; it may change it."""
        content = messages[place].get("content")
        other = [{"type": "text", "text": "another"}] if strict_json.is_array(content) else "another"
        changed = [_with_content(each, other) if at == place else each for at, each in enumerate(messages)]
        if content and self._text(changed) == text:
            raise ColdpressError("it drops the text of the user's last message")

    def _text(self, messages: Messages) -> str:
        assert self._given
        if self._given.today is not None:
            random.seed(0)
        settings = {"messages": messages, "add_generation_prompt": self._given.is_prompt}
        return self._compiled.render(**settings, tools=None, documents=None, **self._given.tokens)


def _with_content(message: Mapping[str, Any], content: Any) -> Mapping[str, Any]:
    return {**message, "content": content} if message.get("content") else message


def compiled(template: Template) -> Any:
    """Compiles a template in jinja's sandbox, with the filters, functions and tags that transformers offers."""
    import jinja2
    from jinja2 import ext, nodes, parser, sandbox, utils

    class Generation(ext.Extension):
        """Writes what is between the tags `generation` and `endgeneration`, which mark text for training."""

        tags = {"generation"}  # noqa: RUF012 - jinja declares it so

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)  # what is set inside is not known outside

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
        now = datetime.now() if template.today is None else datetime.fromisoformat(template.today)
        return now.strftime(form)

    environment: Any = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refused, "strftime_now": strftime_now, "namespace": Namespace}
    return environment.from_string(template.text)


if __name__ == "__main__":
    serve(_TemplateAnswers().answer)
