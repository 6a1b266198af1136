"""Turns the flags of `coldpress` into arguments of the runtime's modules."""

import argparse
import os
import time
from pathlib import Path

from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.drafts import Draft
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.profiles.devices import load_device
from coldpress.runtime.quantities import parse_bytes
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.runtime.trace import Recorder
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError


def open_session(
    arguments: argparse.Namespace,
    selector: str | None,
    cache: str | None,
    dram_budget_bytes: int | None,
    recorder: Recorder | None = None,
) -> Session:
    """Opens a session for the flags, with this selector, cache and budget."""
    return Session(
        arguments.artifact,
        dram_budget_bytes=dram_budget_bytes,
        selector=selector,
        cache=cache,
        flash=arguments.flash,
        activations=arguments.activations,
        kv_cache=arguments.kv_cache,
        collapse=arguments.collapse,
        preload=arguments.preload,
        routing=arguments.routing,
        device=device_of(arguments),
        recorder=recorder,
        modelled=getattr(arguments, "modelled", False),
        identity=getattr(arguments, "identity", None),
        started_s=time.perf_counter() - _process_age_s(),
    )


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """Returns how the flags choose the next tokens."""
    return Sampling(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )


def draft_plugin(name: str | None) -> Draft | None:
    """Returns the draft without a model that `--draft` names; None, for the plan's, if it is not given."""
    return None if name is None else plugins.load("coldpress.runtime.drafts", Draft, name)


def budget_of(arguments: argparse.Namespace) -> int | None:
    """Returns `--dram-budget` in bytes; None if it is not given."""
    return None if arguments.dram_budget is None else parse_bytes(arguments.dram_budget)


def device_of(arguments: argparse.Namespace) -> DeviceProfile | None:
    """Returns the device to simulate; None for the device that the artifact was compiled for."""
    if arguments.device is None:
        return None
    if getattr(arguments, "flash", "simulated") != "simulated":
        raise ColdpressError("--device is the device to simulate, but flash is read directly; add --flash simulated")
    return load_device(arguments.device)


def names_of(text: str | None) -> list[str | None]:
    """Returns the names of a flag that takes several, with commas between them; [None] if it is not given."""
    return [None] if text is None else [name.strip() for name in text.split(",")]


def prompts_of(arguments: argparse.Namespace, artifact: Artifact) -> list[list[int]]:
    """Returns the token ids of each prompt; there is at least one prompt."""
    if arguments.prompt_ids is not None:
        return arguments.prompt_ids
    codec = TextCodec(artifact)
    return [codec.encode(prompt) for prompt in arguments.prompt]


def prompt_ids_of(arguments: argparse.Namespace, artifact: Artifact) -> list[int]:
    """Returns the token ids of the prompt of `bench`; without a prompt, the beginning-of-sequence token, or else 0."""
    if arguments.prompt_ids is not None:
        return arguments.prompt_ids
    if arguments.prompt is None:
        return [artifact.manifest.model.bos_token_id or 0]
    return TextCodec(artifact).encode(arguments.prompt)


def _process_age_s() -> float:
    """Returns the seconds since this process started, interpreter and imports included; 0 if they are unknown."""
    try:
        # field 22 of the line, counted from behind the name in parentheses, since the name may contain spaces
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
