"""Turns the flags of `coldpress` into arguments of the runtime's modules."""

import os
import time
from pathlib import Path

from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cli.arguments import Bench, Generate, ReadingFlags, RunFlags
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.drafts import Draft
from coldpress.runtime.generate.choice import budget_at
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.runtime.trace import Recorder
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError


def open_session(flags: RunFlags, selector: str | None, cache: str | None, recorder: Recorder | None = None) -> Session:
    return Session(
        flags.artifact,
        dram_budget_bytes=budget_of(flags),
        selector=selector,
        cache=cache,
        flash=flags.flash,
        activations=flags.activations,
        kv_cache=flags.kv_cache,
        collapse=flags.collapse,
        preload=flags.preload,
        routing=flags.routing,
        device=_device_of(flags),
        recorder=recorder,
        modelled=flags.modelled,
        identity=flags.identity,
        started_s=time.perf_counter() - _process_age_s(),
    )


def sampling_of(flags: Generate) -> Sampling:
    return Sampling(**{name: getattr(flags, name) for name in Sampling.model_fields})


def draft_plugin(name: str | None) -> Draft | None:
    """Returns the draft that `--draft` names; None, for the plan's, if it is not given."""
    return None if name is None else plugins.load("coldpress.runtime.drafts", Draft, name)


def budget_of(flags: ReadingFlags) -> int | None:
    return budget_at(flags.artifact, flags.dram_budget)


def _device_of(flags: RunFlags) -> DeviceProfile | None:
    if flags.device is None:
        return None
    if flags.flash != "simulated":
        raise ColdpressError("--device is the device to simulate, but flash is read directly; add --flash simulated")
    return load_device(flags.device)


def names_of(text: str | None) -> list[str | None]:
    """Returns the names of a flag that takes several, with commas between them; [None] if it is not given."""
    return [None] if text is None else [name.strip() for name in text.split(",")]


def prompts_of(flags: Generate, artifact: Artifact, codec: TextCodec | None) -> list[list[int]]:
    """Returns the token ids of each prompt; there is at least one prompt. `codec` is the artifact's."""
    if flags.prompt_ids:
        return list(flags.prompt_ids)
    codec = codec or TextCodec(artifact)  # which says that there is no tokenizer
    return [codec.encode(prompt) for prompt in flags.prompt]


def prompt_ids_of(flags: Bench, artifact: Artifact) -> list[int]:
    """Returns the token ids of the prompt of `bench`; without a prompt, the beginning-of-sequence token, or else 0."""
    if flags.prompt_ids is not None:
        return flags.prompt_ids
    if flags.prompt is None:
        return [artifact.manifest.model.bos_token_id or 0]
    return TextCodec(artifact).encode(flags.prompt)


def _process_age_s() -> float:
    """Returns the seconds since this process started, interpreter and imports included; 0 if they are unknown."""
    try:
        # field 22 of the line, counted from behind the name in parentheses, since the name may contain spaces
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
