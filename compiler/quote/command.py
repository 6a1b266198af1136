"""Says, before any build, what a model will do on a device: whether it fits, how fast it decodes, with what quality.

    coldpress quote mistral-7b --device pixel6
    coldpress quote build/prose7m --device all --json
    coldpress quote prose7m-pixel6.coldpress --device oneplus12 --dram-budget 2GB
    coldpress quote mistral-7b --device pixel6 --dram-budget 2GB,3GB,4GB

The model is a name or folder as for `model=`, and only its config.json is read; a build folder, with measured curves
and activations; or an artifact, which carries them. No weight is read. Several budgets are those of one build.
"""

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console

from coldpress.compiler.profiles import device_file
from coldpress.compiler.quote.decide import PROMPT_TOKENS, Asked, device_quotes
from coldpress.compiler.quote.records import DeviceQuote, Quote
from coldpress.compiler.quote.show import show
from coldpress.compiler.quote.sources import Source, find
from coldpress.compiler.stages.allocate import MAX_PPL_RATIO
from coldpress.runtime.cli.command_line import Parser
from coldpress.runtime.profiles.devices import DEVICE_HELP, named_devices, read_device
from coldpress.schemas.errors import ColdpressError


def run(arguments: argparse.Namespace) -> None:
    """Prints a table, or one JSON object (compiler/quote/records.py).

    Raises:
        ColdpressError: if the model, a device or a setting is refused.
    """
    quote = _answered(arguments)
    if arguments.json:
        print(quote.to_json(), end="")
    else:
        show(quote, Console(highlight=False, markup=False))


def answer(argv: list[str]) -> Quote:
    """Returns the quote of a command line. Raises as `run`."""
    parser = Parser(prog="coldpress quote")
    add_arguments(parser)
    return _answered(parser.parse_args(argv))


def _answered(arguments: argparse.Namespace) -> Quote:
    if not 1 <= arguments.max_ppl_ratio <= 100:
        raise ColdpressError(f"--max-ppl-ratio {arguments.max_ppl_ratio:g} was given, expected a number from 1 to 100")
    files = [device_file(name, Path("build")) for name in named_devices(arguments.device)]
    with tempfile.TemporaryDirectory(prefix="coldpress-quote-") as folder:
        return quoted(arguments, files, Path(folder))


def quoted(arguments: argparse.Namespace, files: list[Path], folder: Path) -> Quote:
    """Returns the quote; writes scratch files into `folder`."""
    progress = Console(stderr=True, highlight=False, markup=False)
    with progress.status("reading the model") as status:
        source = find(arguments.model, arguments.revision, folder)
        context_length = arguments.context_length or source.context_length
        asked = Asked(
            dram_budget=arguments.dram_budget,
            max_ppl_ratio=arguments.max_ppl_ratio,
            context_length=context_length,
            quick=len(files) > 1 or source.basis != "measured",
            with_steps=len(files) == 1,
            prompt_tokens=_prompt_tokens(arguments.prompt_tokens, context_length),
        )
        if len(files) == 1:
            found = [*device_quotes(source, read_device(files[0]), asked, status.update, files[0])]
        else:
            found = []
            for number, quotes in enumerate(_each(arguments, files, asked, folder), start=1):
                found += quotes
                status.update(f"{number} of {len(files)} devices")
    return Quote(
        model=source.name,
        source=source.kind,
        basis=source.basis,
        basis_in_words=source.basis_in_words,
        max_ppl_ratio=asked.max_ppl_ratio,
        context_length=asked.context_length,
        prompt_tokens=asked.prompt_tokens,
        devices=tuple(found),
    )


def _prompt_tokens(given: int | None, context_length: int) -> int:
    most = context_length - 1
    if given is not None and not 1 <= given <= most:
        raise ColdpressError(
            f"--prompt-tokens {given} was given, expected 1 to {most}, because the context has {context_length}; "
            "give fewer tokens, or a longer --context-length"
        )
    return min(PROMPT_TOKENS, max(1, most)) if given is None else given


def _each(
    arguments: argparse.Namespace, files: list[Path], asked: Asked, folder: Path
) -> Iterator[tuple[DeviceQuote, ...]]:
    """Yields the quotes of several devices in order; they are searched on all cores."""
    workers = min(len(files), len(os.sched_getaffinity(0)))
    given = (arguments.model, arguments.revision, folder)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, given) as pool:
        yield from pool.map(partial(_on_device, asked), files)


_SOURCES: list[Source] = []
"""The model in a process of the pool: what a pool hands over cannot hold it."""


def _start(model: str, revision: str | None, folder: Path) -> None:
    _SOURCES.append(find(model, revision, Path(tempfile.mkdtemp(dir=folder))))


def _on_device(asked: Asked, file: Path) -> tuple[DeviceQuote, ...]:
    return device_quotes(_SOURCES[0], read_device(file), asked, file=file)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `coldpress quote`."""
    parser.description = __doc__
    parser.add_argument("model", help="what model= takes, a build folder such as build/<model>, or an artifact")
    parser.add_argument("--revision", help="commit of a hub model, 40 hexadecimal digits")
    parser.add_argument("--device", required=True, metavar="NAME[,NAME…]|all", help=DEVICE_HELP)
    parser.add_argument(
        "--dram-budget",
        metavar="BYTES[,…]",
        help="as dram_budget= takes it (default: each device's); several as 1GB,2GB,4GB quote one build of them all, "
        "whose plans share method, format and KV-cache format",
    )
    parser.add_argument(
        "--max-ppl-ratio",
        type=float,
        default=MAX_PPL_RATIO,
        metavar="R",
        help=f"largest allowed perplexity over the source's (default: {MAX_PPL_RATIO})",
    )
    parser.add_argument(
        "--context-length",
        type=int,
        metavar="N",
        help="tokens that the KV cache holds (default: the model's, at most 1024)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help=f"tokens of the prompt whose first token is timed (default: {PROMPT_TOKENS})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
