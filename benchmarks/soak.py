"""Runs a model long on a misbehaving device with changing memory: equal tokens, flat memory, and an end.

A model of 12 layers with random weights generates greedily from a few prompts without faults. Then it generates again
and again, while reads of flash.img come short, are interrupted, fail once or take a hundred times as long
(shared/faulty_reads.c, loaded before the C library), and while the DRAM budget changes every few tokens. Tokens are
compared with the first ones. The selector is `relu`: the order of sums depends on the cache, and a choice by rank may
turn a last bit of rounding into another unit. Resident memory is taken where the budget is back at its largest. Then a
read fails for good, and a bit of every read is wrong: the row has the error, its seconds, and whether the session goes
on afterwards.
"""

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness import Benchmark, Cell, Row, main, option
from benchmarks.harness.apart import apart, run_here
from coldpress.runtime.dram.budget import fixed_bytes
from coldpress.runtime.generate.session import Session
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.manifest import FLASH_FILE
from tests.support.artifacts import Recipe, build_artifact, small_spec

OFF, PASSING, LASTING_ERROR, FLIPPED_BIT = range(4)
FAULTS = {"short": 50, "interrupted": 70, "error": 5000, "slow": 500}
"""Fault -> one in so many reads meets it; errors are far apart, since a read that fails twice is an error."""
SLOW_US = 10_000
TOKENS_OF_A_BUDGET = 16
SHARES = (1.0, 0.3, 0.6, 0.05, 0.8)
"""Shares of the DRAM for units, in turn."""


class Control:
    """The page shared with the library of faulty reads; its layout is that of `struct Control`."""

    def __init__(self, path: Path) -> None:
        """Maps the page."""
        self._words = np.memmap(path, np.int64, "r+", shape=(13,))

    def watch(self, file: Path) -> None:
        """Sets the file whose reads misbehave, and how often each fault comes."""
        found = file.stat()
        self._words[1:3] = found.st_dev, found.st_ino
        self._words[3:8] = *FAULTS.values(), SLOW_US

    def enter(self, mode: int) -> None:
        """Makes reads behave as `mode` says, from now on."""
        self._words[0] = mode

    @property
    def met(self) -> dict[str, int]:
        """Faults so far, by kind."""
        return dict(zip(FAULTS, self._words[9:13].tolist(), strict=True))


def compile_reads(folder: Path) -> Path:
    """Compiles the library that is loaded before the C library; returns its path."""
    library = folder / "faulty_reads.so"
    source = Path(__file__).parent / "shared" / "faulty_reads.c"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def prompts(count: int) -> list[list[int]]:
    """Returns prompts with different beginnings."""
    random = np.random.default_rng(5)
    return [random.integers(3, 90, 4).tolist() for _ in range(count)]


def undisturbed(session: Session, count: int, length: int) -> list[list[int]]:
    """Returns the first `length` tokens of each of `count` prompts."""
    return [list(session.generate(prompt, length, ignore_eos=True).token_ids) for prompt in prompts(count)]


class Soak:
    """The disturbed run."""

    def __init__(self, session: Session, expected: list[list[int]]) -> None:
        """Takes `expected`, the tokens of every prompt."""
        self._session, self._expected = session, expected
        self._fixed = fixed_bytes(session.artifact.manifest, session.plan)
        self._units = session.plan.dram_budget_bytes - self._fixed
        self.tokens = self.different = self.resizes = 0
        self.resident: list[int] = []

    def run(self, num_tokens: int) -> None:
        """Runs prompt after prompt for at least `num_tokens` tokens."""
        while self.tokens < num_tokens:
            for prompt, expected in zip(prompts(len(self._expected)), self._expected, strict=True):
                found: list[int] = []
                for token in self._session.stream(prompt, len(expected), ignore_eos=True):
                    found.append(token.id)
                    if len(found) % TOKENS_OF_A_BUDGET == 0:
                        self._resize()
                self.tokens += len(found)
                self.different += sum(a != b for a, b in zip(found, expected, strict=True))

    def _resize(self) -> None:
        share = SHARES[self.resizes % len(SHARES)]
        self._session.resize(self._fixed + int(share * self._units))
        self.resizes += 1
        if share == max(SHARES):
            self.resident.append(psutil.Process().memory_info().rss)

    @property
    def rss_growth(self) -> float:
        """Resident memory at the end over that after the first tenth."""
        return self.resident[-1] / self.resident[len(self.resident) // 10]


def failing(session: Session, control: Control, mode: int, expected: list[int]) -> dict[str, object]:
    """Runs on a device that fails for good; returns the error, its seconds, and whether the session recovers."""
    session.resize(fixed_bytes(session.artifact.manifest, session.plan))  # caches nothing, so that every token reads
    control.enter(mode)
    start = time.perf_counter()
    try:
        session.generate(prompts(1)[0], len(expected), ignore_eos=True)
        error = "none"
    except ColdpressError as raised:
        error = type(raised).__name__
    seconds = time.perf_counter() - start
    control.enter(OFF)
    again = session.generate(prompts(1)[0], len(expected), ignore_eos=True).token_ids
    return {"error": error, "seconds": seconds, "goes_on": list(again) == expected}


@dataclass(frozen=True)
class Options:
    tokens: int = option(1_000, smoke=16, full=20_000, help="tokens to generate while reads misbehave")
    prompts: int = option(8, smoke=1, help="number of prompts")
    prompt_tokens: int = option(64, smoke=16, help="new tokens per prompt, a multiple of 16")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].tokens": "tokens that were generated while reads misbehaved",
        "rows[].different": "number of these tokens that differ from the undisturbed run's",
        "rows[].met.short": "reads that returned fewer bytes than asked for",
        "rows[].met.interrupted": "reads that a signal interrupted",
        "rows[].met.error": "reads that failed once",
        "rows[].met.slow": "reads that were delayed by 10 ms",
        "rows[].resizes": "number of changes of the DRAM budget",
        "rows[].rss_growth": "resident memory under the largest budget: at the end over that after a tenth of the run",
        **{
            f"rows[].{fault}.{key}": f"{when}: {meaning}"
            for fault, when in (("lasting_error", "all reads fail"), ("flipped_bit", "all reads have a wrong bit"))
            for key, meaning in (
                ("error", "class of the error that the session raises"),
                ("seconds", "seconds until the error"),
                ("goes_on", "whether the session gives the right tokens once reads are right again"),
            )
        },
    }
    programs = ("cc",)
    full_minutes = 10

    def measure(self, cell: Cell) -> Iterator[Row]:
        spec = small_spec(hidden_size=128, intermediate_size=1024, max_position_embeddings=128)
        recipe = Recipe(spec=spec, method="relu", context_length=128, slots_share=0.5)
        built, page = build_artifact(self.folder / "a", recipe), self.folder / "page"
        page.write_bytes(bytes(4096))
        told = {"LD_PRELOAD": str(compile_reads(self.folder)), "FAULTY_READS": str(page)}
        command = ["env", *(f"{name}={value}" for name, value in told.items())]
        yield apart(self, "disturbed", str(built.path), str(page), run=lambda argv: run_here([*command, *argv]))

    def disturbed(self, path: str, page: str) -> Row:
        """Runs everything; called in the process whose reads misbehave."""
        control, options = Control(Path(page)), self.options
        with Session(path, flash="direct") as session:
            expected = undisturbed(session, options.prompts, options.prompt_tokens)
            control.watch(Path(path) / FLASH_FILE)
            control.enter(PASSING)
            soak = Soak(session, expected)
            soak.run(options.tokens)
            met = control.met
            control.enter(OFF)
            return {
                "tokens": soak.tokens,
                "different": soak.different,
                "met": met,
                "resizes": soak.resizes,
                "rss_growth": soak.rss_growth,
                "lasting_error": failing(session, control, LASTING_ERROR, expected[0]),
                "flipped_bit": failing(session, control, FLIPPED_BIT, expected[0]),
            }


if __name__ == "__main__":
    main("soak")
