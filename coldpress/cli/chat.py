"""Chats with an artifact by its checkpoint's template. Each line is a message; the answer appears as it is written.

`/reset` forgets the chat, `/stats` says what it cost, `/exit` or the end of the input ends it.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

import coldpress
from coldpress.runtime.cli.command_line import examples_of
from coldpress.runtime.model import Model
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.text.chat import Message

EXAMPLES = """
  coldpress chat mistral-7b-oneplus12.coldpress --dram 3GB --system "Answer in one sentence."
  echo "What is flash?" | coldpress chat mistral-7b-oneplus12.coldpress --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `coldpress chat`."""
    parser.description, parser.epilog = __doc__, examples_of("chat", EXAMPLES)
    parser.add_argument("artifact", metavar="ARTIFACT", help="folder of an artifact (NAME.coldpress)")
    parser.add_argument("--dram", metavar="BYTES", help="budget, such as 3GB (default: the artifact's largest plan)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the chat")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: 0.7)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first answer (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each answer, and nothing else")


def run(arguments: argparse.Namespace) -> None:
    """Chats until the input ends.

    Raises:
        ColdpressError: if the artifact cannot be loaded, has no chat template, or a chat is longer than its context.
    """
    with coldpress.load(arguments.artifact, dram=arguments.dram) as model:
        start: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
        model.chat_ids([*start, {"role": "user", "content": "?"}])  # refuses an artifact without a template at once
        chat = list(start)
        for number, line in enumerate(_lines(is_quiet=arguments.json)):
            if line == "/reset":
                chat = list(start)
            elif line == "/stats":
                print(_stats(model))
            else:
                chat.append({"role": "user", "content": line})
                chat.append({"role": "assistant", "content": _answer(model, chat, number, arguments)})


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


def _answer(model: Model, chat: list[Message], number: int, arguments: argparse.Namespace) -> str:
    """Prints an answer as it is written, and returns it."""
    pieces: list[str] = []
    drawing = {"temperature": arguments.temperature, "seed": arguments.seed + number}
    for piece in model.stream(model.chat_ids(chat), max_new_tokens=arguments.max_new_tokens, **drawing):
        pieces.append(piece)
        if not arguments.json:
            print(piece, end="", flush=True)
    text = "".join(pieces).strip()
    print(json.dumps({"answer": text, "stats": asdict(model.stats)}) if arguments.json else "", flush=True)
    return text


def _stats(model: Model) -> str:
    found = model.stats
    return (
        f"{found.new_tokens} tokens at {found.decode_tokens_per_s:.1f} tokens/s; {found.hit_rate:.0%} of the units "
        f"were in DRAM, {show_bytes(found.read_bytes)} were read; {show_bytes(found.dram_used_bytes)} of DRAM in use"
    )
