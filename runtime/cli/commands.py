"""The runtime's commands: generate text from an artifact, show, check and measure it, replay a trace, emulate a device.

Each takes the parsed command line and prints; the modules that it calls do the rest.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli import bench, inspect, ladder, sweep
from coldpress.runtime.cli import summary as _summary
from coldpress.runtime.cli.emulation import Caps, Emulation, disk_of, emulate, emulated, exceeded, our_command
from coldpress.runtime.cli.flags import budget_of, draft_plugin, names_of, open_session, prompt_ids_of
from coldpress.runtime.cli.generate import generate
from coldpress.runtime.drafts import NO_DRAFT
from coldpress.runtime.generate.choice import DEFAULT_FLASH, choose_plan
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels.activations import DEFAULT_ACTIVATIONS
from coldpress.runtime.profiles.devices import load_device
from coldpress.runtime.quantities import parse_bytes
from coldpress.runtime.simulate import simulate
from coldpress.schemas.errors import ColdpressError, printable


def _inspect_artifact(arguments: argparse.Namespace) -> None:
    artifact = open_artifact(arguments.artifact)
    summary = inspect.describe(artifact)
    if arguments.json:
        _print_json(summary)
    else:
        print(inspect.render(summary, artifact.manifest.model))


def _verify(arguments: argparse.Namespace) -> None:
    artifact = open_artifact(arguments.artifact, arguments.identity)
    num_bytes = verify_artifact(artifact)
    if arguments.json:
        _print_json({"verified": True, "num_bytes": num_bytes, "manifest_sha256": artifact.sha256})
    else:
        files = len(artifact.manifest.files)
        print(f"{arguments.artifact}: {files} files of {num_bytes} bytes, all as the manifest {artifact.sha256} says")


def _measure(arguments: argparse.Namespace) -> int:
    caps = emulated()
    if arguments.emulate is None and (arguments.scale, arguments.memory, arguments.place) != (None, None, None):
        raise ColdpressError(
            "--scale, --memory and --place are for an emulated device, and there is none; add --emulate"
        )
    if arguments.emulate is not None and caps is None:
        emulation = _emulation(arguments, (arguments.place or Path(arguments.artifact)).resolve())
        _check_same_disk(emulation, Path(arguments.artifact).resolve())
        print(f"emulating {emulation.title()}", flush=True)
        return emulation.run(our_command(arguments.argv))
    prompt_ids = prompt_ids_of(arguments, open_artifact(arguments.artifact))
    if arguments.ladder:
        _check_ladder(arguments)
        return _climb(arguments, prompt_ids, caps)
    if arguments.batch > 1 and arguments.draft not in (None, NO_DRAFT):
        raise ColdpressError(
            f"--draft {arguments.draft} is for one sequence, and --batch is {arguments.batch}; leave one out"
        )
    rows = bench.run(
        lambda selector, cache: open_session(arguments, selector, cache, budget_of(arguments)),
        [(selector, cache) for selector in names_of(arguments.selector) for cache in names_of(arguments.cache)],
        prompt_ids,
        arguments.tokens,
        arguments.runs,
        arguments.batch,
        draft_plugin(arguments.draft),
    )
    print(bench.render(rows))
    drawn = f" of each of {arguments.batch} sequences, drawn at temperature 1" if arguments.batch > 1 else ""
    print(f"prompt of {len(prompt_ids)} tokens; {arguments.runs} runs of {arguments.tokens} decoded tokens{drawn}")
    for note in _notes(rows, arguments, caps):
        print(note)
    _print_json(bench.as_data(rows) | _emulated_as_data(caps))
    return 0


def _check_same_disk(emulation: Emulation, artifact: Path) -> None:
    """Refuses to cap another disk than the artifact's: such caps would have no effect."""
    if (found := disk_of(artifact)).number != emulation.disk.number:
        raise ColdpressError(
            f"--place {emulation.disk.place} is on {emulation.disk.name}, expected {found.name}, the artifact's disk"
        )


def _notes(rows: list[bench.Row], arguments: argparse.Namespace, caps: Caps | None) -> Iterator[str]:
    """Yields what a reader must know about the rows of `bench`."""
    methods = {plan.method for plan in open_artifact(arguments.artifact).manifest.plans}
    others = sorted({row.selector for row in rows} - methods)
    if others:
        made_for, other = ", ".join(sorted(methods)), others[0]
        yield f"the artifact was laid out for {made_for}: one built with method={other} may be faster than {other} here"
    for row in rows:
        rates = row.reads_per_token * row.tokens_per_s, row.read_bytes_per_token * row.tokens_per_s
        if caps and (factor := exceeded(caps, *rates)):
            yield (
                f"{row.selector} read {factor:.1f} times as fast as the caps: the kernel lets short runs exceed them; "
                f"decode more than --tokens {arguments.tokens}"
            )


def _check_ladder(arguments: argparse.Namespace) -> None:
    """Refuses flags that a ladder would ignore, since its steps choose these settings."""
    defaults = {"batch": 1, "activations": DEFAULT_ACTIVATIONS, "flash": DEFAULT_FLASH}
    unset = "kv_cache", "collapse", "preload", "routing", "device", "draft"
    for name, default in (defaults | dict.fromkeys(unset)).items():
        if (given := getattr(arguments, name)) != default:
            flag = name.replace("_", "-")
            raise ColdpressError(
                f"--ladder measures one sequence and chooses its settings, and --{flag} is {given}; leave --{flag} out"
            )


def _climb(arguments: argparse.Namespace, prompt_ids: list[int], caps: Caps | None) -> int:
    manifest = open_artifact(arguments.artifact).manifest
    plan = choose_plan(manifest, budget_of(arguments), arguments.selector, arguments.cache)

    def measure(setting: ladder.Setting) -> bench.Row:
        with Session(arguments.artifact, plan=setting.plan, flash=setting.flash) as session:
            return bench.measure(session, prompt_ids, arguments.tokens, arguments.runs, draft=draft_plugin(NO_DRAFT))

    found = ladder.run(*ladder.steps(manifest, plan), measure, ladder.ROUNDS)
    print(ladder.render(found))
    _print_json(ladder.as_data(found) | _emulated_as_data(caps))
    return 0


def _emulated_as_data(caps: Caps | None) -> dict[str, object]:
    return {"emulated": asdict(caps)} if caps else {}


def _emulate(arguments: argparse.Namespace) -> int:
    emulation = _emulation(arguments, arguments.place.resolve())
    print(f"emulating {emulation.title()}", file=sys.stderr, flush=True)
    return emulation.run(arguments.command)


def _simulate(arguments: argparse.Namespace) -> None:
    cases, source = sweep.cases_of(arguments), sweep.source_of(arguments)
    opened = open_artifact(arguments.artifact)
    drawn = sweep.drawn(opened, source)
    if len(cases) > 1 or source == "signals":
        rows = sweep.swept(Path(arguments.artifact), source, cases)
        data, text = sweep.as_data(rows), sweep.render(rows)
    else:
        artifact, plan = cases[0].of(opened)
        metrics, device = simulate(artifact, plan, sweep.trace_of(opened, source)), artifact.manifest.device
        data = {"device": device.name, "metrics": metrics.model_dump(mode="json")}
        title = "seconds are modelled: a request computes with units as they arrive"
        text = f"{printable(device.title)}; {title}\n{_summary.render(metrics)}"
    if arguments.json:
        _print_json(data | (drawn.as_data() if drawn else {}))
        return
    print(text)
    if drawn:
        print(drawn.render())
    if said := sweep.note(opened, source):
        print(said)


def _emulation(arguments: argparse.Namespace, place: Path) -> Emulation:
    memory_bytes = None if arguments.memory is None else parse_bytes(arguments.memory)
    found = emulate(load_device(arguments.emulate), place, arguments.scale, memory_bytes)
    return replace(found, disk_rates=found.disk_rates or found.disk.measured_if_possible())


def _print_json(data: object) -> None:
    print(json.dumps(data))


RUN: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "generate": generate,
    "inspect": _inspect_artifact,
    "verify": _verify,
    "bench": _measure,
    "simulate": _simulate,
    "emulate": _emulate,
}
