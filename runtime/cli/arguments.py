"""Declares the flags of the runtime's commands. It only parses."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from coldpress.runtime import plugins
from coldpress.runtime.cli.declaration import FILE, PLACE, argument, option, switch
from coldpress.runtime.device_profiles.devices import DEVICE_HELP
from coldpress.runtime.drafts import DRAFT_TOKENS
from coldpress.runtime.dram.kv_cache import KV_CACHE_FORMATS
from coldpress.runtime.generate.choice import DEFAULT_FLASH
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.kernels.activations import ACTIVATIONS, DEFAULT_ACTIVATIONS
from coldpress.schemas.errors import clipped
from coldpress.schemas.layout import Collapse, KvCacheFormat, Preload

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
  coldpress simulate demo.coldpress --trace run.trace --cache belady
  coldpress simulate demo.coldpress --signals --dram-budget 2MB --cache lfu
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
  +preload             preload what later layers will probably need
A step that is not clearly faster is shown but not kept, unless later steps build on it.
"""
BUDGET_HELP = "DRAM in bytes, or as 3GB, 1.5GiB, 50% (default: the artifact's largest plan)"
OPTIONS_HELP = "options behind a colon: window:window_tokens=3"


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"'{clipped(text)}' is not a list of token ids such as 1,2,3") from error


def _sha256(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise click.BadParameter(f"'{text}' is not an identity: 64 digits of 0-9 and a-f")
    return text


def _whole(text: str, least: int = 0) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) < least:
        raise click.BadParameter(f"'{clipped(text)}' is not a whole number of at least {least} and below 10^18")
    return int(text)


def _at_least_one(text: str) -> int:
    return _whole(text, 1)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise click.BadParameter(f"'{clipped(text)}' is not a number such as 0.8") from error


def _once(context: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
    """Refuses a flag that is given twice: click would silently keep only the last value."""
    if len(values) > 1:
        name = parameter.opts[0]
        raise click.UsageError(f"{name} was given more than once, expected one prompt; measure one after the other")
    return values[0] if values else None


def known(package: str) -> str:
    return f"known: {', '.join(plugins.names(f'coldpress.runtime.{package}'))}"


def _selector(help: str) -> Any:
    return option(f"{help} ({known('sparsity')})", metavar="NAME", panel=RUN)


def _cache(help: str) -> Any:
    return option(f"{help} ({known('cache')}; {OPTIONS_HELP})", metavar="NAME", panel=RUN)


def _identity() -> Any:
    return option("refuse any other artifact (see `inspect`)", type=_sha256, metavar="SHA256")


def _sampling(name: str, metavar: str) -> Any:
    declared = Sampling.model_fields[name]
    help, kind = (
        f"{declared.description} (default: {declared.default:g})",
        _whole if declared.annotation is int else _number,
    )
    return option(help, default=declared.default, type=kind, metavar=metavar, panel=SAMPLING)


PROMPT, RUN, SAMPLING, DRAFTS, EMULATION = "Prompt, one of", "Plan and flash", "Sampling", "Drafts", "Emulation"
SOURCE = "What is replayed, one of"
"""Sections of the help."""


@dataclass(frozen=True, kw_only=True)
class OfArtifact:
    artifact: str = argument("folder of an artifact (NAME.coldpress)", type=PLACE)


@dataclass(frozen=True, kw_only=True)
class ReadingFlags(OfArtifact):
    """Flags that `simulate` and runs share: mainly for reading weights."""

    dram_budget: str | None = option(BUDGET_HELP, metavar="BYTES", panel=RUN)
    cache: str | None = None
    collapse: Collapse | None = option(
        "join reads over the plan's gap, or over one that adapts to what reads cost (default: as the plan says)",
        type=click.Choice(get_args(Collapse)),
        panel=RUN,
    )
    preload: Preload | None = option(
        "preload what later layers will probably ask for, or nothing (default: as the plan says)",
        type=click.Choice(get_args(Preload)),
        panel=RUN,
    )
    kv_cache: KvCacheFormat | None = option(
        "format of keys and values; units get the DRAM that int8 saves (default: as the plan says)",
        type=click.Choice(KV_CACHE_FORMATS),
        panel=RUN,
    )


@dataclass(frozen=True, kw_only=True)
class RunFlags(ReadingFlags):
    selector: str | None = None
    routing: str | None = option(
        "how a mixture chooses experts: top_k, as it was trained, or cache_prior:0.2, which prefers experts in DRAM "
        "and changes the text (default: as the plan says)",
        metavar="NAME:STRENGTH",
        panel=RUN,
    )
    flash: str = option(
        f"how flash is read ({known('flash')}); simulated counts the device's time (default: {DEFAULT_FLASH})",
        default=DEFAULT_FLASH,
        metavar="KIND",
        panel=RUN,
    )
    activations: str = option(
        "type to which decoding rounds vectors before it multiplies them with 4- and 8-bit weights (known: "
        f"{', '.join(ACTIVATIONS)}; default: {DEFAULT_ACTIVATIONS})",
        default=DEFAULT_ACTIVATIONS,
        metavar="FORMAT",
        panel=RUN,
    )
    device: str | None = option(
        f"with --flash simulated, {DEVICE_HELP} (default: the artifact's device)", metavar="DEVICE", panel=RUN
    )
    modelled: bool = False
    identity: str | None = None


@dataclass(frozen=True, kw_only=True)
class Generate(RunFlags):
    prompt: tuple[str, ...] = option(
        f"text to continue; up to {FEW_TOKENS} times, to continue several texts at once",
        default=(),
        multiple=True,
        metavar="TEXT",
        panel=PROMPT,
    )
    prompt_ids: tuple[list[int], ...] = option(
        f"token ids to continue, such as 1,2,3; up to {FEW_TOKENS} times, to continue several texts at once",
        default=(),
        multiple=True,
        type=_token_ids,
        metavar="IDS",
        panel=PROMPT,
    )
    prompts: Path | None = option(
        'JSON lines, {"prompt": "text"} or {"prompt_ids": [1, 2, 3]}, any number of them; results are JSON lines in '
        "their order, figures go to standard error",
        type=FILE,
        metavar="FILE",
        panel=PROMPT,
    )
    batch: int | None = option(
        f"continue at most N of --prompts at once (default: {FEW_TOKENS}, or as many as the DRAM budget holds)",
        type=_at_least_one,
        metavar="N",
    )
    max_new_tokens: int = option("tokens to add (default: 64)", default=64, type=_at_least_one, metavar="N")
    stop: tuple[str, ...] = option(
        "end before this text, which is not printed; may be given several times",
        default=(),
        multiple=True,
        metavar="TEXT",
    )
    ignore_eos: bool = switch("go on after a token that ends the text")
    trace: Path | None = option("record the selected units, for `simulate`", type=FILE, metavar="FILE")
    json: bool = switch("print one JSON object, or one per prompt of --prompts, and nothing else")
    modelled: bool = switch(
        "also print the seconds that the run would take on the artifact's device, by its law; these include the reads "
        "for drafts, but not all computing for them"
    )
    identity: str | None = _identity()
    selector: str | None = _selector("a selector other than the plan's")
    cache: str | None = _cache("a cache policy other than the plan's")
    temperature: float = _sampling("temperature", "T")
    top_p: float = _sampling("top_p", "P")
    top_k: int = _sampling("top_k", "N")
    min_p: float = _sampling("min_p", "P")
    repetition_penalty: float = _sampling("repetition_penalty", "R")
    seed: int = _sampling("seed", "N")
    draft: str | None = option(
        "what proposes next tokens, to be checked in one pass; model: the artifact's draft model; the text stays the "
        "same (default: the plan's)",
        type=click.Choice(plugins.names("coldpress.runtime.drafts")),
        panel=DRAFTS,
    )
    draft_tokens: int | None = option(
        f"tokens proposed per pass, with --draft (default: {DRAFT_TOKENS}; a plan says its own number)",
        type=_at_least_one,
        metavar="N",
        panel=DRAFTS,
    )


@dataclass(frozen=True, kw_only=True)
class CapFlags:
    place: Path | None = None
    scale: float | None = option(
        "emulate this share of the device's reads and bytes per second (default: as much as the disk can give)",
        type=_number,
        metavar="F",
        panel=EMULATION,
    )
    memory: str | None = option(
        "cap on all memory (default: the device's DRAM budget)", metavar="BYTES", panel=EMULATION
    )


@dataclass(frozen=True, kw_only=True)
class Bench(CapFlags, RunFlags):
    prompt: str | None = option(
        "text to continue (default: a single token)", multiple=True, callback=_once, metavar="TEXT", panel=PROMPT
    )
    prompt_ids: list[int] | None = option(
        "token ids to continue, such as 1,2,3",
        multiple=True,
        callback=_once,
        type=_token_ids,
        metavar="IDS",
        panel=PROMPT,
    )
    tokens: int = option("tokens decoded per run (default: 32)", default=32, type=_at_least_one, metavar="N")
    runs: int = option(
        "runs per combination; caches stay warm (default: 3)", default=3, type=_at_least_one, metavar="N"
    )
    selector: str | None = _selector("selectors to compare, such as dense,relu")
    cache: str | None = _cache("cache policies to compare, such as lru,lfu")
    ladder: bool = switch(
        "measure the gain of each mechanism, adding one at a time, up to the plan's selector, cache and gap; the steps "
        "are explained below"
    )
    batch: int = option(
        f"decode N sequences at once, up to {FEW_TOKENS}, drawn at temperature 1 (default: 1, greedy)",
        default=1,
        type=_at_least_one,
        metavar="N",
    )
    draft: str | None = option(
        "what proposes next tokens (default: the plan's; the ladder has none)",
        type=click.Choice(plugins.names("coldpress.runtime.drafts")),
    )
    emulate: str | None = option(f"measure with the kernel's caps for {DEVICE_HELP}", metavar="DEVICE", panel=EMULATION)
    place: Path | None = option(
        "with --emulate: a file of at least 16 MiB, or a folder, on the artifact's disk; the disk's speed is measured "
        "on it (default: the artifact's folder)",
        type=FILE,
        metavar="PATH",
        panel=EMULATION,
    )


@dataclass(frozen=True, kw_only=True)
class Simulate(ReadingFlags):
    trace: Path | None = option("trace recorded by `generate --trace`", type=FILE, metavar="FILE", panel=SOURCE)
    signals: bool = switch(
        "let the selector choose anew, seeing the simulated cache, from the signals that an artifact of method=auto "
        "carries: those of a few layers, which stand for all",
        panel=SOURCE,
    )
    cache: str | None = option(f"a cache policy other than the plan's ({OPTIONS_HELP})", metavar="NAME", panel=RUN)
    device: str | None = option(f"{DEVICE_HELP} (default: the artifact's device)", metavar="DEVICE", panel=RUN)
    json: bool = switch("print one JSON object and nothing else")


@dataclass(frozen=True, kw_only=True)
class Emulate(CapFlags):
    device: str = argument(DEVICE_HELP)
    command: tuple[str, ...] = argument("after --: the command and its arguments", nargs=-1, required=True)
    place: Path = option(
        "a file or folder on the disk to cap (default: the current folder)",
        default=Path(),
        type=FILE,
        metavar="PATH",
        panel=EMULATION,
    )


@dataclass(frozen=True, kw_only=True)
class Inspect(OfArtifact):
    json: bool = switch("print one JSON object and nothing else")


@dataclass(frozen=True, kw_only=True)
class Verify(Inspect):
    identity: str | None = _identity()
