"""Chats with an artifact by its checkpoint's template. Each line is a message; the answer appears as it is written.

`/reset` forgets the chat, `/stats` says what it cost, `/help` lists the commands; `/exit` or the end of the input ends
it.
"""

import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import coldpress
from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.cli.declaration import PLACE, argument, command, option, switch
from coldpress.runtime.model import Model
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.text.chat import Message
from coldpress.schemas.errors import ColdpressError

EXAMPLES = """
  coldpress chat mistral-7b-oneplus12.coldpress --dram 3GB --system "Answer in one sentence."
  echo "What is flash?" | coldpress chat mistral-7b-oneplus12.coldpress --json
"""


@dataclass(frozen=True, kw_only=True)
class Chat:
    artifact: str = argument("folder of an artifact (NAME.coldpress)", type=PLACE)
    dram: str | None = option("budget, such as 3GB or 50% (default: the artifact's largest plan)", metavar="BYTES")
    system: str | None = option("what the model is told before the chat", metavar="TEXT")
    max_new_tokens: int = option("of an answer (default: 256)", default=256, type=int, metavar="N")
    temperature: float = option("0 is greedy (default: 0.7)", default=0.7, type=float, metavar="T")
    seed: int = option("of the first answer (default: 0)", default=0, type=int, metavar="N")
    json: bool = switch("print one JSON object for each answer, and nothing else")


COMMANDS = "/reset forgets the chat, /stats says what it cost, /help lists the commands, /exit ends"


def run(flags: Chat) -> None:
    """Chats until the input ends; a message without an answer is told in a sentence, and forgotten. Raises
    ColdpressError if the artifact cannot be loaded or has no chat template."""
    with coldpress.load(flags.artifact, dram=flags.dram) as model:
        start: list[Message] = [{"role": "system", "content": flags.system}] if flags.system else []
        model.chat_ids([*start, {"role": "user", "content": "?"}])  # refuses an artifact without a template at once
        if sys.stdin.isatty() and not flags.json:
            found, name = model.stats, Path(flags.artifact).resolve().name.removesuffix(".coldpress")
            budget = show_bytes(found.dram_budget_bytes)
            print(f"{name} with {budget} of DRAM and room for {found.context_length} tokens; {COMMANDS}")
        chat = list(start)
        for number, line in enumerate(_lines(is_quiet=flags.json)):
            if line == "/reset":
                chat = list(start)
            elif line == "/stats":
                print(_stats(model))
            elif line == "/help":
                print(COMMANDS)
            elif re.fullmatch(r"/[a-z]+", line):
                print(f"there is no command '{line}'; {COMMANDS}", file=sys.stderr)
            else:
                asked: Message = {"role": "user", "content": line}
                try:
                    chat += [asked, {"role": "assistant", "content": _answer(model, [*chat, asked], number, flags)}]
                except ColdpressError as error:
                    sys.stdout.flush()
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    if flags.json:
                        print(json.dumps({"error": str(error)}), flush=True)


def _lines(*, is_quiet: bool) -> Iterator[str]:
    prompt = "> " if sys.stdin.isatty() and not is_quiet else ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is told, and does not end the chat
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
    text = chat[-1]["content"]
    if not strict_json.is_encodable(text):
        raise ColdpressError(f"the message {short(text)} is not UTF-8; set the terminal to UTF-8, or convert the file")
    ids, most = model.chat_ids(chat), model.stats.context_length
    if len(ids) >= most:
        raise ColdpressError(
            f"the chat has {len(ids)} tokens, expected fewer than the context's {most}; /reset forgets the chat, and a "
            "shorter message may fit"
        )
    pieces: list[str] = []
    drawing = {"temperature": flags.temperature, "seed": flags.seed + number}
    for piece in model.stream(ids, max_new_tokens=min(flags.max_new_tokens, most - len(ids)), **drawing):
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
