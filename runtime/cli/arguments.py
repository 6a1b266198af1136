"""Declares the flags and the help of the runtime's commands. It only parses."""

import argparse
import re
from pathlib import Path
from typing import get_args

from coldpress.runtime import plugins
from coldpress.runtime.cli.command_line import examples_of
from coldpress.runtime.drafts import DRAFT_TOKENS
from coldpress.runtime.generate.choice import DEFAULT_FLASH
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.kernels.activations import ACTIVATIONS, DEFAULT_ACTIVATIONS
from coldpress.runtime.plan.kv_cache import KV_CACHE_FORMATS
from coldpress.runtime.profiles.devices import DEVICE_HELP
from coldpress.runtime.synthetic.statistics import Statistics
from coldpress.schemas.errors import clipped
from coldpress.schemas.layout import Collapse, Preload

EXAMPLES = """
  coldpress generate demo.coldpress --prompt "The quick brown" --max-new-tokens 40
  coldpress generate demo.coldpress --prompt-ids 1,403,407 --dram-budget 3MB --selector dense --json
  coldpress generate demo.coldpress --prompt "Once" --temperature 0.8 --top-k 40 --min-p 0.05 --stop "The end"
  coldpress generate demo.coldpress --prompt "Once" --draft lookup --draft-tokens 4
  coldpress generate demo.coldpress --prompt "Once" --prompt "The map was" --temperature 0.8
  coldpress generate demo.coldpress --prompts prompts.jsonl --max-new-tokens 64 > results.jsonl
  coldpress inspect demo.coldpress
  coldpress verify demo.coldpress
  coldpress bench demo.coldpress --selector dense,predictor --cache lru,static --tokens 32
  coldpress generate demo.coldpress --prompt "Once" --trace run.trace
  coldpress bench demo.coldpress --batch 8
  coldpress bench demo.coldpress --emulate pixel6 --scale 0.3
  coldpress bench demo.coldpress --ladder --dram-budget 3MB
  coldpress emulate oneplus12 --scale 0.3 --memory 2GB -- llama-cli -m model.gguf
  coldpress simulate demo.coldpress --trace run.trace --device oneplus12 --dram-budget 2MB
  coldpress simulate demo.coldpress --trace run.trace --device all --dram-budget 2MB,3MB --cache lfu,belady
  coldpress simulate demo.coldpress --signals --dram-budget 2MB,3MB --cache lfu,lru
  coldpress simulate demo.coldpress --synthetic density=0.1:repeated=0.6:tokens=500 --cache lru,lfu
"""
LADDER_STEPS = """steps of --ladder, each under the same DRAM budget:
  naive                read every weight for every token, keep nothing
  hybrid               keep a fixed share of the weights in DRAM, read the rest for every token
  +selector NAME       read only the units that a token needs
  +window              keep the units of the last tokens
  +collapse N          join reads that are at most N bytes apart; `adaptive` finds N while it runs
  +cache NAME          the plan's cache policy in place of the window
  +linked over NAME    the same, but units that were read together are admitted together (Ripple 5.2)
  +overlap             compute while reads are under way
  +io_uring            read through io_uring, where the kernel has it
  +preload             read ahead what later layers will probably need
A step that is slower is shown but not kept, unless later steps build on it.
"""
STATISTICS = "\n".join(
    [
        "statistics of --synthetic:",
        *(f"  {name:<14}{field.description}" for name, field in Statistics.model_fields.items()),
    ]
)
BUDGET_HELP = "DRAM in bytes, or as 3GB, 50MB, 1.5GiB (default: the artifact's largest plan)"
OPTIONS_HELP = "options behind a colon: window:window_tokens=3"


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{clipped(text)}' is not a list of token ids such as 1,2,3") from error


def _sha256(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not an identity: 64 digits of 0-9 and a-f")
    return text


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{clipped(text)}' is not a whole number of at least 1 and below 10^18")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"'{clipped(text)}' is not a whole number of at least 0 and below 10^18")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{clipped(text)}' is not a number such as 0.8") from error


class _Once(argparse.Action):
    """Refuses a flag that is given twice: argparse would silently keep only the last value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} was given more than once, expected one prompt; measure one after the other")
        setattr(namespace, self.dest, values)


HELP = {
    "generate": "continue a prompt, reading weights from flash",
    "inspect": "show what an artifact is: model, files, families, plans",
    "verify": "check every byte of an artifact: digests, page checksums, weights",
    "bench": "measure decoding for selectors and caches; the last line is JSON",
    "simulate": "replay a trace on a modelled device, without weights",
    "emulate": "run any command with the reads and the memory of a device",
}
"""The commands of the runtime, each with what it does."""


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of one of the runtime's commands, and its examples."""
    parser.epilog = examples_of(name, EXAMPLES)
    if name == "emulate":
        _add_emulate(parser)
        return
    parser.add_argument("artifact", metavar="ARTIFACT", help="folder of an artifact (NAME.coldpress)")
    if name == "generate":
        _add_generate(parser)
    elif name == "bench":
        parser.epilog = f"{LADDER_STEPS}\n{parser.epilog}"
        _add_bench(parser)
    elif name == "simulate":
        parser.epilog = f"{STATISTICS}\n\n{parser.epilog}"
        _add_simulate(parser)
    if name in ("generate", "verify"):
        parser.add_argument(
            "--identity", type=_sha256, metavar="SHA256", help="refuse any other artifact (see `inspect`)"
        )
    if name in ("inspect", "verify", "simulate"):
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_prompts(parser)
    parser.add_argument(
        "--max-new-tokens", type=_at_least_one, default=64, metavar="N", help="tokens to add (default: 64)"
    )
    _add_run(parser, "a selector other than the plan's", "a cache policy other than the plan's")
    parser.add_argument(
        "--temperature", type=_number, default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument(
        "--top-p",
        type=_number,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that together have probability P",
    )
    parser.add_argument(
        "--top-k", type=_whole, default=0, metavar="N", help="draw from the N likeliest tokens (default: 0, all)"
    )
    parser.add_argument(
        "--min-p",
        type=_number,
        default=0.0,
        metavar="P",
        help="draw from tokens of at least P times the likeliest's probability (default: 0)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=_number,
        default=1.0,
        metavar="R",
        help="make tokens of the prompt and of the text so far less likely, in greedy decoding, too: divide positive "
        "logits by R, multiply negative ones (default: 1)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text, which is not printed; may be given several times",
    )
    parser.add_argument(
        "--seed",
        type=_whole,
        default=0,
        metavar="N",
        help="seed of the draws; with several prompts, N for the first, N + 1 for the second, ... (default: 0)",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after a token that ends the text")
    _add_draft(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="record the selected units, for `simulate`")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, or one per prompt of --prompts, and nothing else"
    )
    parser.add_argument(
        "--modelled",
        action="store_true",
        help="also print the seconds that the run would take on the artifact's device, by its law; these include the "
        "reads for drafts, but not all computing for them",
    )


def _add_draft(parser: argparse.ArgumentParser) -> None:
    drafts = plugins.names("coldpress.runtime.drafts")
    parser.add_argument(
        "--draft",
        metavar="DRAFT",
        help=f"what proposes next tokens, to be checked in one pass: {', '.join(drafts)}, or the folder of an "
        "artifact with the same vocabulary; the text stays the same (default: the plan's)",
    )
    parser.add_argument(
        "--draft-tokens",
        type=_at_least_one,
        metavar="N",
        help=f"tokens proposed per pass, with --draft (default: {DRAFT_TOKENS}; a plan says its own number)",
    )
    parser.add_argument(
        "--draft-budget",
        metavar="BYTES",
        help="the part of the DRAM that the draft artifact may take (default: its largest plan)",
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--prompt", action=_Once, metavar="TEXT", help="text to continue")
    group.add_argument(
        "--prompt-ids", action=_Once, type=_token_ids, metavar="IDS", help="token ids to continue, such as 1,2,3"
    )
    parser.add_argument(
        "--tokens", type=_at_least_one, default=32, metavar="N", help="tokens decoded per run (default: 32)"
    )
    parser.add_argument(
        "--runs", type=_at_least_one, default=3, metavar="N", help="runs per combination; caches stay warm (default: 3)"
    )
    _add_run(parser, "selectors to compare, such as dense,relu", "cache policies to compare, such as lru,lfu")
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="measure the gain of each mechanism, adding one at a time, up to the plan's selector, cache and gap; the "
        "steps are explained below",
    )
    parser.add_argument(
        "--batch",
        type=_at_least_one,
        default=1,
        metavar="N",
        help=f"decode N sequences at once, up to {FEW_TOKENS}, drawn at temperature 1 (default: 1, greedy)",
    )
    parser.add_argument(
        "--draft",
        choices=plugins.names("coldpress.runtime.drafts"),
        help="what proposes next tokens of a single sequence (default: the plan's; batches and the ladder have none)",
    )
    parser.add_argument("--emulate", metavar="DEVICE", help=f"measure with the kernel's caps for {DEVICE_HELP}")
    parser.add_argument(
        "--place",
        type=Path,
        metavar="PATH",
        help="with --emulate: a file of at least 16 MiB, or a folder, on the artifact's disk; the disk's speed is "
        "measured on it (default: the artifact's folder)",
    )
    _add_caps(parser)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--trace", type=Path, metavar="FILE", help="trace recorded by `generate --trace`")
    group.add_argument(
        "--synthetic",
        metavar="NAME=VALUE:…",
        help="draw a trace with these statistics, explained below; the output compares them with the drawn trace's",
    )
    group.add_argument(
        "--signals",
        action="store_true",
        help="let the selector choose anew, seeing the simulated cache, from the signals that an artifact of "
        "method=auto carries: those of a few layers, which stand for all; gives a table",
    )
    parser.add_argument("--dram-budget", metavar="BYTES[,…]", help=f"{BUDGET_HELP}; several give a table")
    parser.add_argument(
        "--cache",
        metavar="NAME[,…]",
        help=f"a cache policy other than the plan's ({OPTIONS_HELP}); several give a table",
    )
    _add_reading(parser)
    parser.add_argument(
        "--device",
        metavar="DEVICE[,…]|all",
        help=f"{DEVICE_HELP} (default: the artifact's device); several give a table",
    )


def _add_emulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("emulate", metavar="DEVICE", help=DEVICE_HELP)
    parser.add_argument(
        "--place",
        type=Path,
        default=Path(),
        metavar="PATH",
        help="a file or folder on the disk to cap (default: the current folder)",
    )
    _add_caps(parser)
    parser.add_argument("command", nargs="+", metavar="CMD", help="after --: the command and its arguments")


def _add_caps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale",
        type=_number,
        metavar="F",
        help="emulate this share of the device's reads and bytes per second (default: as much as the disk can give)",
    )
    parser.add_argument("--memory", metavar="BYTES", help="cap on all memory (default: the device's DRAM budget)")


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--collapse",
        choices=get_args(Collapse),
        help="join reads over the plan's gap, or over one that adapts to what reads cost (default: as the plan says)",
    )
    parser.add_argument(
        "--preload",
        choices=get_args(Preload),
        help="read ahead what later layers will probably ask for, or nothing (default: as the plan says)",
    )
    parser.add_argument(
        "--kv-cache",
        choices=KV_CACHE_FORMATS,
        help="format of keys and values; units get the DRAM that int8 saves (default: as the plan says)",
    )


def _add_routing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--routing",
        metavar="NAME[:STRENGTH]",
        help="how a mixture chooses experts: top_k, as it was trained, or cache_prior:0.2, which prefers experts in "
        "DRAM and changes the text (default: as the plan says)",
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group(required=True)
    several = f"up to {FEW_TOKENS} times, to continue several texts at once"
    group.add_argument("--prompt", action="append", metavar="TEXT", help=f"text to continue; {several}")
    group.add_argument(
        "--prompt-ids",
        action="append",
        type=_token_ids,
        metavar="IDS",
        help=f"token ids to continue, such as 1,2,3; {several}",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSON lines, {"prompt": "text"} or {"prompt_ids": [1, 2, 3]}, any number of them; results are JSON lines '
        "in their order, figures go to standard error",
    )
    parser.add_argument(
        "--batch",
        type=_at_least_one,
        metavar="N",
        help=f"continue at most N of --prompts at once (default: {FEW_TOKENS}, or as many as the DRAM budget holds)",
    )


def _add_run(parser: argparse.ArgumentParser, selector_help: str, cache_help: str) -> None:
    parser.add_argument("--dram-budget", metavar="BYTES", help=BUDGET_HELP)
    selectors, caches, flashes = (plugins.names(f"coldpress.runtime.{kind}") for kind in ("sparsity", "cache", "flash"))
    parser.add_argument("--selector", metavar="NAME", help=f"{selector_help} (known: {', '.join(selectors)})")
    parser.add_argument("--cache", metavar="NAME", help=f"{cache_help} (known: {', '.join(caches)}; {OPTIONS_HELP})")
    _add_reading(parser)
    _add_routing(parser)
    parser.add_argument(
        "--flash",
        default=DEFAULT_FLASH,
        metavar="KIND",
        help=f"how flash is read (known: {', '.join(flashes)}); simulated counts the device's time (default: "
        f"{DEFAULT_FLASH})",
    )
    parser.add_argument(
        "--activations",
        default=DEFAULT_ACTIVATIONS,
        metavar="FORMAT",
        help=f"type to which decoding rounds vectors before it multiplies them with 4- and 8-bit weights (known: "
        f"{', '.join(ACTIVATIONS)}; default: {DEFAULT_ACTIVATIONS})",
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help=f"with --flash simulated, {DEVICE_HELP} (default: the artifact's device)"
    )
