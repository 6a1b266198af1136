"""Answers a quote: finds the model, and searches for each device, several devices on all cores."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from coldpress.compiler.profiles import device_file
from coldpress.compiler.quote.decide import PROMPT_TOKENS, QuoteSettings, Quoting
from coldpress.compiler.quote.records import DeviceQuote, Quote
from coldpress.compiler.quote.sources import QuoteSource, find
from coldpress.compiler.workflow.keys import check_flags
from coldpress.runtime.device_profiles.devices import named_devices, read_device
from coldpress.schemas.errors import ColdpressError

if TYPE_CHECKING:
    from coldpress.compiler.quote.command import Question


def answer(question: "Question") -> Quote:
    """Returns the quote; raises ColdpressError if the model, a device or a setting is refused."""
    files = [device_file(name, Path("build")) for name in named_devices(question.device)]
    progress = Console(stderr=True, highlight=False, markup=False)
    with (
        tempfile.TemporaryDirectory(prefix="coldpress-quote-") as folder,
        progress.status("reading the model") as status,
    ):
        source = find(question.model, _keys(question), Path(folder))
        asked = QuoteSettings(
            quick=len(files) > 1 or source.basis != "measured",
            with_steps=len(files) == 1,
            prompt_tokens=_prompt_tokens(question.prompt_tokens, source.settings["context_length"]),
        )
        if len(files) == 1:
            found = [*Quoting(source, read_device(files[0]), asked, status.update, files[0]).quotes()]
        else:
            found = []
            for number, quotes in enumerate(_each(question, files, asked, Path(folder)), start=1):
                found += quotes
                status.update(f"{number} of {len(files)} devices")
    return Quote(
        model=source.model.name,
        source=source.kind,
        basis=source.basis,
        basis_in_words=source.basis_in_words,
        max_ppl_ratio=source.max_ppl_ratio,
        context_length=source.settings["context_length"],
        prompt_tokens=asked.prompt_tokens,
        devices=tuple(found),
    )


def _keys(question: "Question") -> dict[str, str]:
    check_flags(question.more)
    budget = {} if question.dram_budget is None else {"dram_budget": question.dram_budget}
    return {**question.more, **budget}


def _prompt_tokens(given: int | None, context_length: int) -> int:
    most = context_length - 1
    if given is not None and not 1 <= given <= most:
        raise ColdpressError(
            f"--prompt-tokens {given} was given, expected 1 to {most}, because the context has {context_length}; "
            "give fewer tokens, or a longer --context-length"
        )
    return min(PROMPT_TOKENS, max(1, most)) if given is None else given


def _each(
    question: "Question", files: list[Path], asked: QuoteSettings, folder: Path
) -> Iterator[tuple[DeviceQuote, ...]]:
    workers = min(len(files), len(os.sched_getaffinity(0)))
    given = (question.model, _keys(question), folder)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, given) as pool:
        yield from pool.map(partial(_on_device, asked), files)


_SOURCES: list[QuoteSource] = []
"""The model, found once by each process of the pool, since tasks cannot carry it."""


def _start(model: str, keys: Mapping[str, str], folder: Path) -> None:
    _SOURCES.append(find(model, keys, Path(tempfile.mkdtemp(dir=folder))))


def _on_device(asked: QuoteSettings, file: Path) -> tuple[DeviceQuote, ...]:
    return Quoting(_SOURCES[0], read_device(file), asked, file=file).quotes()
