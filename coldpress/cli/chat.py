"""Chats with an artifact by its checkpoint's template. Each line is a message; the answer appears as it is written.

`/reset` forgets the chat, `/stats` says what it cost, `/exit` or the end of the input ends it.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import coldpress
from coldpress.runtime.cli.declaration import PLACE, argument, command, option, switch
from coldpress.runtime.model import Model
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.text.chat import Message

EXAMPLES = """
  coldpress chat mistral-7b-oneplus12.coldpress --dram 3GB --system "Answer in one sentence."
  echo "What is flash?" | coldpress chat mistral-7b-oneplus12.coldpress --json
"""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """The flags of `coldpress chat`."""

    artifact: str = argument("folder of an artifact (NAME.coldpress)", type=PLACE)
    dram: str | None = option("budget, such as 3GB (default: the artifact's largest plan)", metavar="BYTES")
    system: str | None = option("what the model is told before the chat", metavar="TEXT")
    max_new_tokens: int = option("of an answer (default: 256)", default=256, type=int, metavar="N")
    temperature: float = option("0 is greedy (default: 0.7)", default=0.7, type=float, metavar="T")
    seed: int = option("of the first answer (default: 0)", default=0, type=int, metavar="N")
    json: bool = switch("print one JSON object for each answer, and nothing else")


def run(flags: Chat) -> None:
    """Chats until the input ends.

    Raises:
        ColdpressError: if the artifact cannot be loaded, has no chat template, or a chat is longer than its context.
    """
    with coldpress.load(flags.artifact, dram=flags.dram) as model:
        start: list[Message] = [{"role": "system", "content": flags.system}] if flags.system else []
        model.chat_ids([*start, {"role": "user", "content": "?"}])  # refuses an artifact without a template at once
        chat = list(start)
        for number, line in enumerate(_lines(is_quiet=flags.json)):
            if line == "/reset":
                chat = list(start)
            elif line == "/stats":
                print(_stats(model))
            else:
                chat.append({"role": "user", "content": line})
                chat.append({"role": "assistant", "content": _answer(model, chat, number, flags)})


def _lines(*, is_quiet: bool) -> Iterator[str]:
    """Yields messages and commands until the input ends, or `/exit`."""
    prompt = "> " if sys.stdin.isatty() and not is_quiet else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line:
            yield line


def _answer(model: Model, chat: list[Message], number: int, flags: Chat) -> str:
    """Prints an answer as it is written, and returns it."""
    pieces: list[str] = []
    drawing = {"temperature": flags.temperature, "seed": flags.seed + number}
    for piece in model.stream(model.chat_ids(chat), max_new_tokens=flags.max_new_tokens, **drawing):
        pieces.append(piece)
        if not flags.json:
            print(piece, end="", flush=True)
    text = "".join(pieces).strip()
    print(json.dumps({"answer": text, "stats": asdict(model.stats)}) if flags.json else "", flush=True)
    return text


def _stats(model: Model) -> str:
    found = model.stats
    return (
        f"{found.new_tokens} tokens at {found.decode_tokens_per_s:.1f} tokens/s; {found.hit_rate:.0%} of the units "
        f"were in DRAM, {show_bytes(found.read_bytes)} were read; {show_bytes(found.dram_used_bytes)} of DRAM in use"
    )


COMMAND = command(Chat, run, name="chat", help=__doc__, examples=EXAMPLES)
