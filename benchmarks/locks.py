"""Tests two builds at once in one folder (the second is refused, the first unhurt), and kills of snakemake alone.

A tiny model is built under two orderings of its units; these builds give the correct artifact of each ordering. A trial
changes the folder from one ordering to the other. A moment after that build has started, drawn uniformly from 0 to 0.6
of its usual time, another build starts: in turn with the same settings from the same folder, and with other settings
from another folder. A trial is `refused` if exactly one of the two ended with code 2 and the sentence that names the
other's process, `unhurt` if that other one ended with code 0 and the artifact of its settings.

In a kill, snakemake alone gets SIGKILL at a random moment, and its jobs run on. Builds are started until none is
refused because of such a job; the kill is `resumed` if one ended with the correct artifact.

Snakemake and its jobs are forked from processes that have imported the libraries. `--smoke` builds as far as the
package, without verifying and publishing it.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from coldpress.compiler.io import sha256_of
from coldpress.schemas.errors import ColdpressError
from tests.support import warm
from tests.support.models import write_corpus, write_model

ORDERS = ("frequency", "cold")
OTHER = {"format": "fp16"}
LATEST = 0.6
"""Share of a build after which no second one starts, since snakemake takes a while to begin."""
BESIDE_A_JOB = "error: a job of an earlier build of "
PATIENCE_S = 600.0
CONFIG = {
    "device": "pixel6",
    "dram_budget": "90%",
    "calibration_tokens": 1024,
    "context_length": 64,
    "method": "relu",
    "format": "int8_group32",
    "max_ppl_ratio": "off",
    "min_top1_agreement": "off",
}


@dataclass(frozen=True)
class Options:
    trials: int = option(8, smoke=1, full=20, help="number of trials: pairs of builds at once")
    kills: int = option(4, smoke=1, full=10, help="number of kills")
    layers: int = option(4, smoke=1, help="layers of the model")
    until: str = option("report", smoke="package", help="last stage of a build")
    seed: int = option(0, help="seed of the random moments")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].case": "trial: two builds at once; kill: SIGKILL to snakemake alone",
        "rows[].number": "number of the trial or of the kill",
        "rows[].after_s": "seconds after which the second build started or snakemake was killed",
        "rows[].undisturbed_s": "seconds of an undisturbed change from one ordering to the other",
        "rows[].second?": "trial: settings of the second build, same as the first's or other",
        "rows[].refused?": "trial: whether exactly one build was refused, naming the other's process",
        "rows[].unhurt?": "trial: whether the other build ended with the artifact of its settings",
        "rows[].resumed?": "kill: whether a later build gave the correct artifact",
        "rows[].beside_a_job?": "kill: builds refused before that because a job of the killed build still ran",
        "trials": "number of trials",
        "refused": "trials in which exactly one of the two builds was refused",
        "unhurt": "trials in which the other build ended with the artifact of its settings",
        "kills": "number of kills",
        "resumed": "kills after which a later build gave the correct artifact",
        "beside_a_job": "builds that were refused because a job of the killed build still ran, over all kills",
    }
    over = ({"case": ("trial",), "number": "trials"}, {"case": ("kill",), "number": "kills"})
    full_minutes = 12

    def measure(self, cell: Cell) -> Iterator[Row]:
        subject = self.once("subject", lambda: subject_of(self.folder, self.options))
        number, is_kill = cell["number"], cell["case"] == "kill"
        random = np.random.default_rng([self.options.seed, is_kill, number])
        after_s = float(random.random() * LATEST * subject.seconds)
        found = kill_alone(subject, after_s) if is_kill else try_two(subject, number % 2 == 1, after_s)
        yield {"after_s": after_s, "undisturbed_s": subject.seconds, **found}

    def figures(self, rows: Rows) -> Figures:
        sums = ("refused", "unhurt", "resumed", "beside_a_job")
        return {
            "trials": sum(row["case"] == "trial" for row in rows),
            "kills": sum(row["case"] == "kill" for row in rows),
            **{name: sum(row.get(name, 0) for row in rows) for name in sums},
        }


@dataclass
class Subject:
    """The model under test, its build folder and the expected artifacts."""

    folder: Path
    config: dict[str, Any]
    arguments: tuple[str, ...]
    identities: dict[str, str]
    """Ordering -> sha256 of the artifact's manifest."""
    seconds: float = 0.0
    """Seconds of an undisturbed change from one ordering to the other."""

    def start(self, folder: Path, **config: Any) -> warm.Running:
        """Starts a build in the subject's build folder, called from `folder`."""
        return warm.start(folder, *self.arguments, **{**self.config, **config})

    def identity(self) -> str:
        """Returns the sha256 of the manifest of the artifact in the build folder."""
        return sha256_of(self.folder / "build" / "tiny" / "pixel6" / "package" / "manifest.json")

    def next_order(self) -> str:
        """Returns the ordering that the build folder does not hold."""
        return ORDERS[self.identity() == self.identities[ORDERS[0]]]

    def is_right(self, order: str) -> bool:
        """Returns whether the build folder holds the artifact of this ordering."""
        return self.identity() == self.identities[order]


def subject_of(folder: Path, options: Options) -> Subject:
    """Writes the model and builds it under both orderings."""
    write_model(folder / "tiny", num_hidden_layers=options.layers, relu=True)
    corpus = write_corpus(folder / "corpus.txt", 400)
    config = {**CONFIG, "model": folder / "tiny", "corpus": corpus, "build_dir": folder / "build"}
    subject = Subject(folder, config, ("--until", options.until, "--quiet", "all"), {})
    for order in ORDERS:
        start_s = time.monotonic()
        running = subject.start(folder, order=order)
        if running.wait():
            raise ColdpressError(running.said().splitlines()[-1].removeprefix("error: "))
        subject.seconds = time.monotonic() - start_s
        subject.identities[order] = subject.identity()
    return subject


def try_two(subject: Subject, other: bool, delay_s: float) -> Row:
    """Runs two builds at once; returns whether one was refused, and whether the other one is unhurt."""
    order = subject.next_order()
    first = subject.start(subject.folder, order=order)
    time.sleep(delay_s)
    changes = OTHER if other else {}
    second = subject.start(subject.folder / "elsewhere" if other else subject.folder, order=order, **changes)
    codes = {process: process.wait(PATIENCE_S) for process in (first, second)}
    winner, loser = (first, second) if codes[second] == 2 else (second, first)
    sentence = f"error: another build of tiny runs, process {winner.pid}, since "
    refused = codes[loser] == 2 and loser.said().splitlines()[-1].startswith(sentence)
    # a faster second build with other settings leaves an artifact that the trial does not compare
    unhurt = codes[winner] == 0 and ((winner is second and other) or subject.is_right(order))
    return {"second": "other" if other else "same", "refused": refused, "unhurt": unhurt}


def kill_alone(subject: Subject, delay_s: float) -> Row:
    """Kills snakemake; returns whether a later build completed, and how many were refused before because of a job."""
    order = subject.next_order()
    first = subject.start(subject.folder, order=order)
    time.sleep(delay_s)
    with suppress(ProcessLookupError):  # the build may have ended
        os.kill(first.pid, signal.SIGKILL)
    first.wait()
    refusals, deadline_s = 0, time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        done = subject.start(subject.folder, order=order)
        code = done.wait()
        if code != 2 or BESIDE_A_JOB not in done.said():
            return {"resumed": code == 0 and subject.is_right(order), "beside_a_job": refusals}
        refusals += 1
    return {"resumed": False, "beside_a_job": refusals}


if __name__ == "__main__":
    main("locks")
