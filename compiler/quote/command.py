"""Says, before any build, what a model will do on a device: whether it fits, how fast it decodes, with what quality.

    python -m coldpress.compiler quote mistral-7b --device pixel6
    python -m coldpress.compiler quote build/prose7m --device all --json
    python -m coldpress.compiler quote prose7m-pixel6.coldpress --device oneplus12 --dram-budget 2GB

The model is what `model=` takes, of which only config.json is read; a build folder, whose curves and activations were
measured; or an artifact, which carries them. No weight is read.
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

from coldpress.compiler.profiles import device_file, load_device
from coldpress.compiler.quote.decide import Asked, Tell, device_quote
from coldpress.compiler.quote.records import DeviceQuote, Quote
from coldpress.compiler.quote.show import show
from coldpress.compiler.quote.sources import Source, find
from coldpress.compiler.stages.allocate import MAX_PPL_RATIO
from coldpress.runtime.cli.command_line import Parser
from coldpress.runtime.profiles.devices import DEVICE_HELP, device_names
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError

ALL = "all"


def main(argv: list[str]) -> None:
    """Runs the command line: a table, or one JSON object (compiler/quote/records.py), on standard output.

    Raises:
        ColdpressError: if the model, a device or a setting is refused.
    """
    arguments = _build_parser().parse_args(argv)
    if not 1 <= arguments.max_ppl_ratio <= 100:
        raise ColdpressError(f"--max-ppl-ratio {arguments.max_ppl_ratio:g} was given, expected a number from 1 to 100")
    devices = _devices(arguments.device)
    with tempfile.TemporaryDirectory(prefix="coldpress-quote-") as folder:
        quote = quoted(arguments, devices, Path(folder))
    if arguments.json:
        print(quote.to_json(), end="")
    else:
        show(quote, Console(highlight=False, markup=False))


def quoted(arguments: argparse.Namespace, devices: list[DeviceProfile], folder: Path) -> Quote:
    """Returns the quote; writes scratch files into `folder`."""
    progress = Console(stderr=True, highlight=False, markup=False)
    with progress.status("reading the model") as status:
        source = find(arguments.model, arguments.revision, folder)
        asked = Asked(
            dram_budget=arguments.dram_budget,
            max_ppl_ratio=arguments.max_ppl_ratio,
            context_length=arguments.context_length or source.context_length,
            quick=len(devices) > 1 or source.basis != "measured",
            with_steps=len(devices) == 1,
        )
        found: list[DeviceQuote] = []
        for number, one in enumerate(_each(source, devices, asked, status.update), start=1):
            found.append(one)
            status.update(f"{number} of {len(devices)} devices")
    return Quote(
        model=source.name,
        source=source.kind,
        basis=source.basis,
        basis_in_words=source.basis_in_words,
        max_ppl_ratio=asked.max_ppl_ratio,
        context_length=asked.context_length,
        devices=tuple(found),
    )


def _each(source: Source, devices: list[DeviceProfile], asked: Asked, tell: Tell) -> Iterator[DeviceQuote]:
    """Yields the devices' quotes in order; several are searched on all cores."""
    if len(devices) == 1:
        yield device_quote(source, devices[0], asked, tell)
        return
    workers = min(len(devices), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(_on_device, source, asked), devices)


def _on_device(source: Source, asked: Asked, device: DeviceProfile) -> DeviceQuote:
    return device_quote(source, device, asked)


def _devices(named: str) -> list[DeviceProfile]:
    names = device_names() if named == ALL else [name for name in named.split(",") if name]
    if not names:
        raise ColdpressError("--device names no device; give one, several with commas between them, or all")
    return [load_device(device_file(name, Path("build"))) for name in names]


def _build_parser() -> Parser:
    parser = Parser(
        prog="python -m coldpress.compiler quote",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="what model= takes, a build folder such as build/<model>, or an artifact")
    parser.add_argument("--revision", help="commit of a hub model, 40 hexadecimal digits")
    parser.add_argument("--device", required=True, metavar="NAME[,NAME…]|all", help=DEVICE_HELP)
    parser.add_argument("--dram-budget", metavar="BYTES", help="as dram_budget= takes it (default: each device's)")
    parser.add_argument(
        "--max-ppl-ratio",
        type=float,
        default=MAX_PPL_RATIO,
        metavar="R",
        help=f"the most perplexity over the source's (default: {MAX_PPL_RATIO})",
    )
    parser.add_argument(
        "--context-length",
        type=int,
        metavar="N",
        help="tokens that the KV cache holds (default: the model's, at most 1024)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
