"""Runs commands on hostile and damaged input, made by structured edits of valid input: `python -m tools.fuzz`.

    python -m tools.fuzz --mutants 10000 --seed 1             artifacts, given to every command of the runtime
    python -m tools.fuzz --checkpoints 500 --seed 1           checkpoints, given to the compiler
    python -m tools.fuzz --mutants 10000 --seed 1 --only 123  mutant 123 alone; its folder is kept

A mutant is a small valid artifact or checkpoint with one to four edits (tools/fuzz/artifacts.py, checkpoints.py). In
most mutants of artifacts, digests and checksums are then made consistent again, so that only the content is wrong. Each
command runs in a forked process with limits of memory and time. Its end is counted as `fine` (exit 0), `refused` (exit
2, one plain line on stderr that begins with `error:`), or as a failure: `untidy`, `traceback`, `crash`, `hang`,
`over_2_gb`, and `silent` if `verify` accepts damage without mended digests. Failures of one kind are shown once, with
the smallest list of edits of the first. The last line is one JSON object; the exit code is 1 if there were failures.

Why no library: hypothesis shrinks and replays examples inside one process, but an example here is several processes
with limits, counted and repeated by number. atheris needs instrumented code in its own process, so that a crash or
an endless loop would end the campaign, too. The same seed gives the same mutants on every machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tools.fuzz.campaign import Outcome, Run, Target, campaign, draw, smallest, try_out
from tools.fuzz.limited import CLASSES

REPORT_EVERY = 500


def main(argv: list[str] | None = None) -> int:
    """Runs a campaign or one mutant; returns 1 if a command failed, else 0."""
    arguments = _parser().parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive forks
    with tempfile.TemporaryDirectory(prefix="fuzz-bases-") as folder:
        target = _target(arguments, Path(folder))
        if arguments.only is not None:
            return _show_one(target, arguments.seed, arguments.only)
        return _run(target, arguments)


def _target(arguments: argparse.Namespace, folder: Path) -> Target:
    """Makes the target; imports it here, since only checkpoints need torch."""
    if arguments.mutants is not None:
        from tools.fuzz.artifacts import Artifacts

        return Artifacts(folder)
    from tools.fuzz.checkpoints import BASES, Checkpoints

    return Checkpoints(folder, arguments.bases or BASES)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description="Tries mutated artifacts or checkpoints.")
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--mutants", type=int, metavar="N", help="mutants of artifacts to try")
    kinds.add_argument("--checkpoints", type=int, metavar="N", help="mutants of checkpoints to try")
    parser.add_argument(
        "--bases", nargs="+", metavar="NAME", help="bases of the checkpoints, such as gguf (default: all)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of all random choices (default: 1)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="number of the first mutant (default: 0)")
    parser.add_argument("--only", type=int, metavar="K", help="try mutant K alone and keep its folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="mutants at a time")
    return parser


def _run(target: Target, arguments: argparse.Namespace) -> int:
    started_s = time.monotonic()
    counts: Counter[str] = Counter()
    failures: dict[tuple[str, str], list[tuple[Outcome, Run]]] = {}
    count = arguments.checkpoints if arguments.mutants is None else arguments.mutants
    numbers = range(arguments.first, arguments.first + count)
    for done, outcome in enumerate(campaign(target, arguments.seed, numbers, arguments.jobs), 1):
        for run in outcome.runs:
            counts[run.ended.kind] += 1
            if run.failed:
                same = failures.setdefault(run.ended.signature, [])
                same.append((outcome, run))
                if len(same) == 1:  # now, in case the campaign is interrupted
                    print(f"mutant {outcome.mutant.number}: {run.ended.kind} in {run.command}", file=sys.stderr)
        if done % REPORT_EVERY == 0:
            print(f"{done} mutants, {time.monotonic() - started_s:.0f} s: {_figures(counts)}", file=sys.stderr)
    for found in failures.values():
        _show_failure(target, arguments, found)
    print(f"{count} mutants in {time.monotonic() - started_s:.0f} s; {counts['silent']} with silent damage")
    print(_figures(counts))
    return 1 if failures else 0


def _figures(counts: Counter[str]) -> str:
    return json.dumps({kind: counts[kind] for kind in CLASSES})


def _show_failure(target: Target, arguments: argparse.Namespace, found: list[tuple[Outcome, Run]]) -> None:
    """Prints the first failure of one kind, with the smallest list of edits that causes it."""
    outcome, failure = found[0]
    least = smallest(target, outcome, failure)
    commands = ", ".join(sorted({run.command for _, run in found}))
    print(f"\n{failure.ended.kind} in {commands}, {len(found)} times; first in mutant {outcome.mutant.number}:")
    print(f"  base {least.mutant.base}, mended: {least.mutant.mending}")
    for done in least.done:
        print(f"  {done!a:.300}")
    for line in failure.ended.words.splitlines():
        print(f"    {line!a:.300}")
    bases = f"--bases {' '.join(arguments.bases)} " if arguments.bases else ""
    print(f"  again: {bases}--seed {arguments.seed} --only {outcome.mutant.number}")


def _show_one(target: Target, seed: int, number: int) -> int:
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{number}-")) / "mutant"
    outcome = try_out(target, draw(target, seed, number), folder)
    print(f"{folder}: base {outcome.mutant.base}, mended: {outcome.mutant.mending}")
    for done in outcome.done:
        print(f"  {done!a:.300}")
    for run in outcome.runs:
        print(f"{run.command}: {run.ended.kind}\n    {run.ended.words!a:.2000}")
    return int(any(run.failed for run in outcome.runs))


if __name__ == "__main__":
    sys.exit(main())
