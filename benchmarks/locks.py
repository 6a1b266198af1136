"""Two builds at once in one folder: the second is refused, the first is unhurt. And kills of the build alone.

`python -m benchmarks.locks [--trials 20] [--kills 10] [--seed 0]`. A tiny model is built under two orderings of
its units, which gives the artifact that each must give. In a trial the folder changes from one ordering to the other,
and a moment after that build has started, drawn uniformly from 0 to 0.6 of the time that it takes, another one starts:
in turn with the same settings from the same folder, and with other settings from another folder. `refused` are the
trials in which exactly one of the two ended with code 2 and the sentence that names the other's process, `unhurt` those
in which that other one ended with code 0 and the very artifact of its settings.

Then builds are killed with SIGKILL at random moments, snakemake alone: its jobs run on. Builds are started until none
is refused because of such a job; `resumed` are the kills after which one ended with the right artifact, `beside_a_job`
the refusals. The last line is {trials, refused, unhurt, kills, resumed, beside_a_job}.
"""

import argparse
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.shared.report import finish, show
from coldpress.compiler.io import sha256_of
from tests.support.models import write_corpus, write_model
from tests.support.pipeline import build, command, environment, snakemake

ORDERS = ("frequency", "cold")
OTHER = {"format": "fp16", "density": 0.5}
LATEST = 0.6
"""Share of a build after which no second one is started: snakemake takes a while to begin."""
BESIDE_A_JOB = "error: a job of an earlier build of "
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Subject:
    """What is built, where, and what must come out."""

    folder: Path
    config: dict[str, object]
    identities: dict[str, str]
    """Ordering -> sha256 of the artifact's manifest."""
    seconds: float
    """A change from one ordering to the other, undisturbed."""

    def start(self, folder: Path, **config: object) -> subprocess.Popen[str]:
        """A build in the subject's build folder, called from `folder`."""
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            command("--quiet", "all", **{**self.config, **config}),
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def is_right(self, order: str) -> bool:
        """Whether the artifact that stands there is the one of this ordering."""
        return identity(self.folder) == self.identities[order]


def identity(folder: Path) -> str:
    """sha256 of the manifest of the artifact that stands under its name."""
    (manifest,) = folder.glob("build/tiny/pixel6/*.coldpress/manifest.json")
    return sha256_of(manifest)


def measure(folder: Path) -> Subject:
    """Writes the model and builds it under both orderings."""
    write_model(folder / "tiny", num_hidden_layers=4, relu=True)
    config: dict[str, object] = {
        "model": folder / "tiny",
        "corpus": write_corpus(folder / "corpus.txt", 400),
        "build_dir": folder / "build",
        "device": "pixel6",
        "dram_budget": "80%",
        "calibration_tokens": 1024,
        "context_length": 64,
        "method": "topk",
        "format": "int8_group32",
        "max_ppl_ratio": "off",
        "min_top1_agreement": "off",
    }
    identities = {}
    seconds = 0.0
    for order in ORDERS:
        start = time.monotonic()
        build(folder, order=order, **config)
        seconds = time.monotonic() - start
        identities[order] = identity(folder)
    return Subject(folder, config, identities, seconds)


def try_two(subject: Subject, order: str, other: bool, delay_s: float) -> tuple[bool, bool]:
    """(whether one of two builds was refused, whether the one that was not is unhurt)."""
    first = subject.start(subject.folder, order=order)
    time.sleep(delay_s)
    changes = OTHER if other else {}
    second = subject.start(subject.folder / "elsewhere" if other else subject.folder, order=order, **changes)
    said = {process: process.communicate(timeout=PATIENCE_S)[1] for process in (first, second)}
    winner, loser = (first, second) if second.returncode == 2 else (second, first)
    sentence = f"error: another build of tiny runs, process {winner.pid}, since "
    refused = loser.returncode == 2 and said[loser].splitlines()[-1].startswith(sentence)
    if winner is second and other:  # it was the faster one, and built what the trial does not compare
        unhurt = winner.returncode == 0
    else:
        unhurt = winner.returncode == 0 and subject.is_right(order)
    return refused, unhurt


def kill_alone(subject: Subject, order: str, delay_s: float) -> tuple[bool, int]:
    """(whether the build came to its end after its first process was killed, refusals because of a job before that)."""
    first = subject.start(subject.folder, order=order)
    time.sleep(delay_s)
    first.kill()
    first.wait()
    refusals = 0
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        done = snakemake(subject.folder, "--quiet", "all", order=order, **subject.config)
        if done.returncode != 2 or BESIDE_A_JOB not in done.stderr:
            return done.returncode == 0 and subject.is_right(order), refusals
        refusals += 1
    return False, refusals


def main() -> None:
    """Prints the tables and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    trials: list[tuple[str, float, bool, bool]] = []
    kills: list[tuple[float, bool, int]] = []
    with tempfile.TemporaryDirectory(dir=".") as name:
        subject = measure(Path(name).resolve())
        print(f"undisturbed: {subject.seconds:.0f} s", flush=True)
        for number in range(arguments.trials + arguments.kills):
            order, delay_s = ORDERS[number % 2], float(rng.random() * LATEST * subject.seconds)
            if number < arguments.trials:
                other = number % 4 >= 2
                trials.append(
                    ("other settings" if other else "same settings", delay_s, *try_two(subject, order, other, delay_s))
                )
                print(trials[-1], flush=True)
            else:
                kills.append((delay_s, *kill_alone(subject, order, delay_s)))
                print(kills[-1], flush=True)
    show("two builds at once", ("second", "after s", "refused", "first unhurt"), trials)
    show("kills", ("after s", "resumed", "refused beside a job"), kills)
    finish(
        {
            "trials": len(trials),
            "refused": sum(refused for _, _, refused, _ in trials),
            "unhurt": sum(unhurt for *_, unhurt in trials),
            "kills": len(kills),
            "resumed": sum(resumed for _, resumed, _ in kills),
            "beside_a_job": sum(refusals for *_, refusals in kills),
        }
    )


if __name__ == "__main__":
    main()
