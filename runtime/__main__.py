"""`coldpress-run`: generates text from an artifact, shows, checks and measures it, replays a trace, emulates a device.

Parses the command line and prints; everything else is done by the modules it calls. Bad input ends in one sentence on
stderr and exit code 2.
"""

import argparse
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import numpy as np
from safetensors import SafetensorError

from runtime import _bench, _inspect, _ladder, _plugins, _summary
from runtime._arguments import build_parser
from runtime._sampling import Sampling
from runtime.artifact.integrity import verify_artifact
from runtime.artifact.reader import Artifact, open_artifact
from runtime.device_file import load_device, load_record
from runtime.draft_model import DraftModel, beside_draft
from runtime.drafts import Drafting
from runtime.emulation import Caps, Emulation, emulate, emulated, our_command
from runtime.generate import Session, choose_plan, on_device
from runtime.quantities import parse_bytes
from runtime.simulate import simulate
from runtime.text_stream import TextStream
from runtime.token_statistics import Token
from runtime.tokenizer import TextCodec
from runtime.trace import Recorder, load_trace
from schemas.device import DeviceProfile
from schemas.errors import ColdpressError, printable

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a stranger's tokenizer could move a terminal's cursor with."""
EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141


def _generate(arguments: argparse.Namespace) -> None:
    recorder, other = _recorder(arguments.trace), _draft_session(arguments)
    budget = _budget(arguments)
    if other:
        budget = beside_draft(open_artifact(arguments.artifact).manifest, other, budget)
    session = _session(arguments, arguments.selector, arguments.cache, budget, recorder)
    codec = TextCodec.of(session.artifact)
    prompt_ids = _prompt_ids(arguments, session.artifact)
    text = _text_stream(arguments, prompt_ids, codec)
    done = session.generate(
        prompt_ids,
        arguments.max_new_tokens,
        sampling=_sampling(arguments),
        ignore_eos=arguments.ignore_eos,
        draft=DraftModel(other, session.artifact) if other else _draft_plugin(arguments),
        draft_tokens=arguments.draft_tokens,
        on_token=_writer(prompt_ids, codec, text, io.StringIO() if arguments.json else sys.stdout),
    )
    if recorder:
        _save_trace(recorder, arguments.trace)
    if not arguments.json:
        print(_shown(text.rest() if text else "") + "\n\n" + _summary.render(done.metrics, done.tokens))
        if other:
            print(_summary.render_draft(other.store))
        return
    _print_json(
        {
            "prompt_token_ids": prompt_ids,
            "token_ids": list(done.token_ids),
            "text": text.text() if text else None,
            "stop": text.stop if text else None,
            "metrics": done.metrics.model_dump(mode="json"),
            **_summary.as_data(done.tokens),
            "draft": other and _summary.draft_as_data(other.store),
        }
    )


def _inspect_artifact(arguments: argparse.Namespace) -> None:
    artifact = open_artifact(arguments.artifact)
    summary = _inspect.describe(artifact)
    if arguments.json:
        _print_json(summary)
    else:
        print(_inspect.render(summary, artifact.manifest.model))


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
    if arguments.emulate is not None and caps is None:
        emulation = _emulation(arguments, Path(arguments.artifact).resolve())
        print(f"emulating {emulation.title()}", flush=True)
        return emulation.run(our_command(arguments.argv))
    prompt_ids = _prompt_ids(arguments, open_artifact(arguments.artifact))
    if arguments.ladder:
        return _climb(arguments, prompt_ids, caps)
    rows = _bench.run(
        lambda selector, cache: _session(arguments, selector, cache, _budget(arguments)),
        [(selector, cache) for selector in _names(arguments.selector) for cache in _names(arguments.cache)],
        prompt_ids,
        arguments.tokens,
        arguments.runs,
    )
    print(_bench.render(rows))
    print(f"prompt of {len(prompt_ids)} tokens; {arguments.runs} runs of {arguments.tokens} decoded tokens")
    _print_json(_bench.as_data(rows) | _emulated_as_data(caps))
    return 0


def _climb(arguments: argparse.Namespace, prompt_ids: list[int], caps: Caps | None) -> int:
    manifest = open_artifact(arguments.artifact).manifest
    plan = choose_plan(manifest, _budget(arguments), arguments.selector, arguments.cache)

    def measure(setting: _ladder.Setting) -> _bench.Row:
        with Session(arguments.artifact, plan=setting.plan, flash=setting.flash) as session:
            return _bench.measure(session, prompt_ids, arguments.tokens, arguments.runs)

    found = _ladder.run(*_ladder.steps(manifest, plan), measure)
    print(_ladder.render(found))
    _print_json(_ladder.as_data(found) | _emulated_as_data(caps))
    return 0


def _emulated_as_data(caps: Caps | None) -> dict[str, object]:
    return {"emulated": asdict(caps)} if caps else {}


def _emulate(arguments: argparse.Namespace) -> int:
    emulation = _emulation(arguments, arguments.place.resolve())
    print(f"emulating {emulation.title()}", file=sys.stderr, flush=True)
    return emulation.run(arguments.command)


def _simulate(arguments: argparse.Namespace) -> None:
    opened = open_artifact(arguments.artifact)
    artifact = on_device(opened, _device(arguments))
    plan = choose_plan(artifact.manifest, _budget(arguments), None, arguments.cache, arguments.collapse)
    metrics = simulate(artifact, plan, load_trace(arguments.trace))
    if arguments.json:
        _print_json({"device": artifact.manifest.device.name, "metrics": metrics.model_dump(mode="json")})
    else:
        print(
            f"{artifact.manifest.device.title}; seconds are modelled: a request for units takes the longer of reading "
            "and computing"
        )
        print(_summary.render(metrics))


def _text_stream(arguments: argparse.Namespace, prompt_ids: list[int], codec: TextCodec | None) -> TextStream | None:
    if codec is None and arguments.stop:
        raise ColdpressError(f"{arguments.artifact}: stop strings need a tokenizer, and the artifact has none")
    return TextStream(codec, prompt_ids, arguments.stop) if codec else None


def _writer(
    prompt_ids: list[int], codec: TextCodec | None, text: TextStream | None, out: TextIO
) -> Callable[[Token], bool]:
    """A function that writes new tokens as they come, the first one after the prompt, and says when a stop has come."""
    begun = False

    def write(token: Token) -> bool:
        nonlocal begun
        before = ""
        if not begun:  # now that the session has found the prompt's ids to be ids
            before, begun = codec.decode(prompt_ids) if codec else " ".join(map(str, prompt_ids)), True
        out.write(_shown(before + (text.add(token.id) if text else f" {token.id}")))
        out.flush()
        return text is not None and text.stop is not None

    return write


def _shown(text: str) -> str:
    return CONTROL.sub("\ufffd", text)


# From flags to what the modules take


def _session(
    arguments: argparse.Namespace,
    selector: str | None,
    cache: str | None,
    dram_budget_bytes: int | None,
    recorder: Recorder | None = None,
) -> Session:
    return Session(
        arguments.artifact,
        dram_budget_bytes=dram_budget_bytes,
        selector=selector,
        cache=cache,
        flash=arguments.flash,
        activations=arguments.activations,
        collapse=arguments.collapse,
        device=_device(arguments),
        recorder=recorder,
        identity=getattr(arguments, "identity", None),
        started_s=time.perf_counter() - _process_age_s(),
    )


def _draft_plugin(arguments: argparse.Namespace) -> Drafting | None:
    """A draft without a model."""
    return None if arguments.draft is None else _plugins.load("runtime.drafts", arguments.draft).Draft()


def _draft_session(arguments: argparse.Namespace) -> Session | None:
    """The session of a draft artifact; None where the draft is none."""
    if arguments.draft is None or arguments.draft in _plugins.names("runtime.drafts"):
        if arguments.draft_budget is not None:
            raise ColdpressError("--draft-budget is what a draft artifact may take, and there is none; leave it out")
        return None
    budget = None if arguments.draft_budget is None else parse_bytes(arguments.draft_budget)
    return Session(arguments.draft, dram_budget_bytes=budget, flash=arguments.flash, activations=arguments.activations)


def _sampling(arguments: argparse.Namespace) -> Sampling:
    return Sampling(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )


def _recorder(path: Path | None) -> Recorder | None:
    """A recorder if there is a place for its trace, which is better known before the run than after it."""
    if path is not None and not path.parent.is_dir():
        raise ColdpressError(f"{path}: there is no folder {path.parent}; make it, or write the trace elsewhere")
    if path is not None and path.is_symlink() | (path.exists() and not path.is_file()):
        raise ColdpressError(f"{path}: is no regular file, which a trace would replace; write the trace elsewhere")
    return None if path is None else Recorder()


def _save_trace(recorder: Recorder, path: Path) -> None:
    try:
        recorder.save(path)
    except SafetensorError as error:  # how the library reports that a file cannot be written
        raise ColdpressError(f"{path}: the trace cannot be written ({error})") from error


def _budget(arguments: argparse.Namespace) -> int | None:
    return None if arguments.dram_budget is None else parse_bytes(arguments.dram_budget)


def _emulation(arguments: argparse.Namespace, place: Path) -> Emulation:
    memory_bytes = None if arguments.memory is None else parse_bytes(arguments.memory)
    return emulate(load_device(arguments.emulate), place, arguments.scale, memory_bytes)


def _device(arguments: argparse.Namespace) -> DeviceProfile | None:
    if arguments.device is None:
        return None
    if getattr(arguments, "flash", "simulated") != "simulated":
        raise ColdpressError("--device is the device to simulate, but flash is read directly; add --flash simulated")
    return load_record(arguments.device)


def _prompt_ids(arguments: argparse.Namespace, artifact: Artifact) -> list[int]:
    """The prompt's ids; without a prompt, the token that begins every text."""
    if arguments.prompt_ids is not None:
        return arguments.prompt_ids
    if arguments.prompt is None:
        return [artifact.manifest.model.bos_token_id or 0]
    return TextCodec(artifact).encode(arguments.prompt)


def _names(text: str | None) -> list[str | None]:
    return [None] if text is None else [name.strip() for name in text.split(",")]


def _process_age_s() -> float:
    """Seconds since this process started, interpreter and imports included; 0 where the system does not say."""
    try:
        # field 22 of the line, counted behind the name in parentheses, which may contain spaces
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


# Printing


def _print_json(data: object) -> None:
    print(json.dumps(data))


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "generate": _generate,
    "inspect": _inspect_artifact,
    "verify": _verify,
    "bench": _measure,
    "simulate": _simulate,
    "emulate": _emulate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `coldpress-run`; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run
    arguments = build_parser(COMMANDS).parse_args(argv)
    arguments.argv = sys.argv[1:] if argv is None else list(argv)
    subject = getattr(arguments, "artifact", "emulate")
    try:
        with np.errstate(all="ignore"):  # what overflows is looked for in results, and refused in a sentence
            code = arguments.run(arguments)
        sys.stdout.flush()
    except ColdpressError as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader of our output has left: nothing to say, and nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        return _fail(f"{error.filename or subject}: {error.strerror or error}")
    except MemoryError:
        return _fail(f"{subject}: more memory was asked for than this process may have; give a smaller --dram-budget")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code or 0


def _fail(sentence: str) -> int:
    print(f"error: {printable(sentence)}", file=sys.stderr)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
