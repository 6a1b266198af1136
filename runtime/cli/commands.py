"""The runtime's commands: generate text from an artifact, show, check and measure it, replay a trace, emulate a device.

Each function takes the flags of its command and prints; its docstring is the command's help.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import click

from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli import bench, inspect, ladder
from coldpress.runtime.cli import summary as _summary
from coldpress.runtime.cli.arguments import (
    EXAMPLES,
    LADDER_STEPS,
    PROMPT,
    SOURCE,
    Bench,
    CapFlags,
    Emulate,
    Generate,
    Inspect,
    Simulate,
    Verify,
)
from coldpress.runtime.cli.declaration import command
from coldpress.runtime.cli.emulation import Caps, Emulation, disk_of, emulate, emulated, exceeded
from coldpress.runtime.cli.flags import budget_of, draft_plugin, names_of, open_session, prompt_ids_of
from coldpress.runtime.cli.generate import generate
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.drafts import NO_DRAFT
from coldpress.runtime.generate.choice import DEFAULT_FLASH, choose_plan
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels.activations import DEFAULT_ACTIVATIONS
from coldpress.runtime.quantities import parse_bytes
from coldpress.runtime.signals import decide, has_signals, load_signals
from coldpress.runtime.simulate import on_device, simulate
from coldpress.runtime.sparsity import sees_residency
from coldpress.runtime.trace import Event, load_trace
from coldpress.schemas.device import UNCOMPUTED
from coldpress.schemas.errors import ArtifactError, ColdpressError, printable


def _inspect_artifact(flags: Inspect) -> None:
    """Shows what an artifact is: model, files, families, plans."""
    artifact = open_artifact(flags.artifact)
    summary = inspect.describe(artifact)
    if flags.json:
        print(json.dumps(summary))
    else:
        print(inspect.render(summary, artifact.manifest.model))


def _verify(flags: Verify) -> None:
    """Checks every byte of an artifact: digests, page checksums, weights."""
    artifact = open_artifact(flags.artifact, flags.identity)
    num_bytes = verify_artifact(artifact)
    if flags.json:
        print(json.dumps({"verified": True, "num_bytes": num_bytes, "manifest_sha256": artifact.sha256}))
    else:
        files = len(artifact.manifest.files)
        print(f"{flags.artifact}: {files} files of {num_bytes} bytes, all as the manifest {artifact.sha256} says")


def _measure(flags: Bench) -> int:
    """Measures decoding for selectors and caches; the last line is JSON."""
    caps = emulated()
    if flags.emulate is None and (flags.scale, flags.memory, flags.place) != (None, None, None):
        raise ColdpressError(
            "--scale, --memory and --place are for an emulated device, and there is none; add --emulate"
        )
    if flags.emulate is not None and caps is None:
        emulation = _emulation(flags.emulate, flags, (flags.place or Path(flags.artifact)).resolve())
        _check_same_disk(emulation, Path(flags.artifact).resolve())
        print(f"emulating {emulation.title()}", flush=True)
        return emulation.run([sys.executable, "-m", "coldpress", *click.get_current_context().find_root().obj])
    prompt_ids = prompt_ids_of(flags, open_artifact(flags.artifact))
    if flags.ladder:
        _check_ladder(flags)
        return _climb(flags, prompt_ids, caps)
    how = prompt_ids, flags.tokens, flags.runs, flags.batch, draft_plugin(flags.draft)
    rows = [
        bench.measure(open_session(flags, selector, cache), *how)
        for selector in names_of(flags.selector)
        for cache in names_of(flags.cache)
    ]
    print(bench.render(rows))
    drawn = f" of each of {flags.batch} sequences, drawn at temperature 1" if flags.batch > 1 else ""
    print(f"prompt of {len(prompt_ids)} tokens; {flags.runs} runs of {flags.tokens} decoded tokens{drawn}")
    for note in _notes(rows, flags, caps):
        print(note)
    print(json.dumps({"runs": list(map(asdict, rows))} | ({"emulated": asdict(caps)} if caps else {})))
    return 0


def _check_same_disk(emulation: Emulation, artifact: Path) -> None:
    """Refuses to cap another disk than the artifact's: such caps would have no effect."""
    if (found := disk_of(artifact)).number != emulation.disk.number:
        raise ColdpressError(
            f"--place {emulation.disk.place} is on {emulation.disk.name}, expected {found.name}, the artifact's disk"
        )


def _notes(rows: list[bench.Row], flags: Bench, caps: Caps | None) -> Iterator[str]:
    methods = {plan.method for plan in open_artifact(flags.artifact).manifest.plans}
    others = sorted({row.selector for row in rows} - methods)
    if others:
        made_for, other = ", ".join(sorted(methods)), others[0]
        yield f"the artifact was laid out for {made_for}: one built with method={other} may be faster than {other} here"
    for row in rows:
        rates = row.reads_per_token * row.tokens_per_s, row.read_bytes_per_token * row.tokens_per_s
        if caps and (factor := exceeded(caps, *rates)):
            yield (
                f"{row.selector} read {factor:.1f} times as fast as the caps: the kernel lets short runs exceed them; "
                f"decode more than --tokens {flags.tokens}"
            )
        if caps:
            yield _prediction(row, caps)


def _prediction(row: bench.Row, caps: Caps) -> str:
    flash_s = max(row.reads_per_token / caps.reads_per_s, row.read_bytes_per_token / caps.bytes_per_s)
    computing_s = max(0.0, 1 / row.tokens_per_s - row.flash_s_per_token)
    least, most = 1 / (flash_s + computing_s), 1 / max(flash_s, computing_s)
    whole = f"at most {1 / (flash_s * caps.scale):.1f} tokens/s" if flash_s else "any speed"
    return (
        f"{row.selector}, {row.cache}: measured {row.tokens_per_s:.1f} tokens/s, predicted {least:.1f} to {most:.1f} "
        f"here: {1000 * flash_s:.2f} ms of reads under the caps and {1000 * computing_s:.2f} ms of this machine's "
        f"computing a token, one after the other or at the same time; {caps.device} itself, whose computing is not "
        f"emulated, allows {whole} by the same reads: compare a quote for {caps.device} with that"
    )


def _check_ladder(flags: Bench) -> None:
    """Refuses flags that a ladder would ignore, since its steps choose these settings."""
    defaults = {"batch": 1, "activations": DEFAULT_ACTIVATIONS, "flash": DEFAULT_FLASH}
    unset = "kv_cache", "collapse", "preload", "routing", "device", "draft"
    for name, default in (defaults | dict.fromkeys(unset)).items():
        if (given := getattr(flags, name)) != default:
            flag = name.replace("_", "-")
            raise ColdpressError(
                f"--ladder measures one sequence and chooses its settings, and --{flag} is {given}; leave --{flag} out"
            )


def _climb(flags: Bench, prompt_ids: list[int], caps: Caps | None) -> int:
    manifest = open_artifact(flags.artifact).manifest
    plan = choose_plan(manifest, budget_of(flags), flags.selector, flags.cache)

    def measure(setting: ladder.LadderSetting) -> bench.Row:
        with Session(flags.artifact, plan=setting.plan, flash=setting.flash) as session:
            return bench.measure(session, prompt_ids, flags.tokens, flags.runs, draft=draft_plugin(NO_DRAFT))

    found = ladder.run(*ladder.steps(manifest, plan), measure, ladder.ROUNDS)
    print(ladder.render(found))
    print(json.dumps({"ladder": list(map(asdict, found))} | ({"emulated": asdict(caps)} if caps else {})))
    return 0


def _emulate(flags: Emulate) -> int:
    """Runs any command with the reads and the memory of a device."""
    emulation = _emulation(flags.device, flags, flags.place.resolve())
    print(f"emulating {emulation.title()}", file=sys.stderr, flush=True)
    return emulation.run(list(flags.command))


def _simulate(flags: Simulate) -> None:
    """Replays a trace on a modelled device, without weights."""
    opened = open_artifact(flags.artifact)
    artifact = on_device(opened, None if flags.device is None else load_device(flags.device))
    asked = budget_of(flags), None, flags.cache, flags.collapse, flags.preload, flags.kv_cache
    plan, device = choose_plan(artifact.manifest, *asked), artifact.manifest.device
    if flags.trace is None:
        decided = decide(artifact, plan, load_signals(opened))
        data, shown = {"per_token": asdict(decided)}, _summary.render_decided(decided)
    else:
        metrics = simulate(artifact, plan, trace_of(flags.trace))
        data, shown = {"metrics": metrics.model_dump(mode="json")}, _summary.render(metrics)
    if flags.json:
        print(json.dumps({"device": device.name, **data}))
        return
    title = "seconds are modelled: a request computes with units as they arrive"
    title += "" if device.compute else f"; speeds are upper bounds: {UNCOMPUTED}"
    title += "; the draft model's are not counted" if plan.draft_bytes else ""
    print(f"{printable(device.title)}; {title}\n{shown}")
    if flags.trace and sees_residency(plan):
        anew = "with --signals it chooses anew"
        other = "an artifact of method=auto could choose anew"
        print(
            f"{plan.method} uses what is in DRAM, and the trace has its choices with the cache of its own run; "
            f"{anew if has_signals(opened) else other}"
        )


def trace_of(path: Path) -> Iterable[Event]:
    """Returns the events of a recorded trace, which can be iterated over again. Raises `ColdpressError` if the file is
    no trace."""
    try:
        return load_trace(path)
    except ArtifactError as error:
        raise ColdpressError(
            f"{path}: is not a trace, expected a file that `generate --trace` wrote ({error})"
        ) from error


def _emulation(device: str, flags: CapFlags, place: Path) -> Emulation:
    memory_bytes = None if flags.memory is None else parse_bytes(flags.memory)
    found = emulate(load_device(device), place, flags.scale, memory_bytes)
    return replace(found, disk_rates=found.disk_rates or found.disk.measured_if_possible())


COMMANDS = {
    made.name or "": made
    for made in (
        command(Generate, generate, name="generate", examples=EXAMPLES, one_of=PROMPT, needs_one=True),
        command(Inspect, _inspect_artifact, name="inspect", examples=EXAMPLES),
        command(Verify, _verify, name="verify", examples=EXAMPLES),
        command(Bench, _measure, name="bench", examples=EXAMPLES, more_help=LADDER_STEPS, one_of=PROMPT),
        command(Simulate, _simulate, name="simulate", examples=EXAMPLES, one_of=SOURCE, needs_one=True),
        command(Emulate, _emulate, name="emulate", examples=EXAMPLES),
    )
}
