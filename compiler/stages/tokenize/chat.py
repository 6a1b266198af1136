"""Renders a chat as text with the checkpoint's chat template: an untrusted jinja program.

transformers renders it in its own sandbox, which blocks everything except the use of time and memory. So it runs in a
separate process, with limits on processor seconds and memory per chat and on the length of the text. Date and random
numbers, which some templates use, are fixed: the same chat gives the same text.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
from datetime import datetime, tzinfo
from pathlib import Path
from typing import IO, Any

from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.source_tokenizer import CHAT_TEMPLATE, MAX_SETTINGS_BYTES, SETTINGS
from coldpress.schemas.errors import ColdpressError

MAX_CPU_S = 5
"""Processor seconds for one chat."""
MAX_MEMORY_BYTES = 1 << 30
"""Address space beyond what the process has before it renders anything."""
MAX_GROWTH = 16
"""Characters of text per character of the chat's JSON; a template may add `SPARE_CHARS` to each chat."""
SPARE_CHARS = 1 << 16
TODAY = datetime(2024, 7, 26)
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A checkpoint's template; the process that renders it starts with the first chat."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the private folder that `ingest` made."""
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Returns a chat's text.

        Raises:
            ColdpressError: if the checkpoint has no template, or it fails, refuses the chat, or reaches a limit.
        """
        process = self._process = self._process or self._start()
        told, heard = _pipes(process)
        answer = ""
        try:
            told.write(json.dumps(messages) + "\n")
            told.flush()
            answer = heard.readline()
        except BrokenPipeError:
            pass  # the process has ended; the answer stays empty
        if not answer:
            code = process.wait()
            reason = (
                f"took more than {MAX_CPU_S} s" if code == -signal.SIGPROF else f"ended its process with code {code}"
            )
            raise ColdpressError(f"the checkpoint's chat template {reason} for this chat; give another template")
        found = json.loads(answer)
        if "text" not in found:
            raise ColdpressError(
                f"the checkpoint's chat template refuses this chat ({found['error']}); leave the record out, or name "
                "another field with corpus_field"
            )
        return found["text"]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in _pipes(self._process):
                pipe.close()

    def _start(self) -> subprocess.Popen[str]:
        template, tokens = read_template(self._folder)
        process = subprocess.Popen(
            [sys.executable, "-c", "from coldpress.compiler.stages.tokenize import chat; chat.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"},
        )
        told, _ = _pipes(process)
        told.write(json.dumps([template, tokens, MAX_CPU_S]) + "\n")
        return process


def read_template(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns (the template, special tokens by name) of a checkpoint, from chat_template.jinja or
    tokenizer_config.json.

    Raises:
        ColdpressError: if it has none, or several and none called `default`.
    """
    settings = read_object(folder / SETTINGS, MAX_SETTINGS_BYTES) if (folder / SETTINGS).is_file() else {}
    found = settings.get("chat_template")
    if (folder / CHAT_TEMPLATE).is_file():
        found = (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[0].get("template") if named else None
    if not isinstance(found, str):
        raise ColdpressError(
            f"the record is a chat, and the checkpoint has no chat template; put {CHAT_TEMPLATE} into its folder, or "
            "name a field of text with corpus_field"
        )
    tokens = {name: settings.get(name) for name in SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return found, {name: text for name, text in texts.items() if isinstance(text, str)}


def serve() -> None:
    """Runs in the process: reads a line of JSON with template, special tokens and seconds, then answers each chat with
    a line."""
    from transformers.utils import chat_template_utils

    class FixedDate(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return TODAY.replace(tzinfo=tz)

    chat_template_utils.__dict__["datetime"] = FixedDate  # templates call it through `strftime_now`
    template, tokens, max_cpu_s = json.loads(sys.stdin.readline())
    limit = _address_space_bytes() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        random.seed(0)
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # nobody handles the signal, so it ends the process
        try:
            rendered = chat_template_utils.render_jinja_template([json.loads(line)], chat_template=template, **tokens)
            answer = _answer(rendered[0][0], len(line))
        except MemoryError:
            answer = {"error": f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"}
        except Exception as error:  # jinja's errors, or any that the template's expressions raise
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _answer(text: str, num_chars: int) -> dict[str, str]:
    most = MAX_GROWTH * num_chars + SPARE_CHARS
    if len(text) > most:
        return {"error": f"{num_chars} characters became {len(text)}, expected at most {most}"}
    return {"text": text}


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise TypeError("the process was started without pipes")
    return process.stdin, process.stdout
