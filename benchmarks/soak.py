"""A long run on a device that misbehaves, and whose memory changes: the same tokens, flat memory, and an end.

`python -m benchmarks.soak [--tokens 10000]`, on Linux with a C compiler. A model of 12 layers with random weights
generates greedily from a few prompts without faults; then again and again, while reads of flash.img come short, are
interrupted, fail once or take a hundred times as long (benchmarks/shared/faulty_reads.c, put before the C library), and
while the DRAM budget changes every few tokens. Tokens are compared with the first ones: the selector is `relu`, since
the order of sums follows what is cached, and a choice by rank may turn a last bit of rounding into another unit.
Resident memory is taken where the budget is back at its largest. Then a read fails for good, and a bit of every read is
wrong: what is raised, after how many seconds, and whether the session goes on where the device does.

The last line is {tokens, different, met, resizes, rss_growth, lasting_error, flipped_bit}: `met` counts faults by kind,
`rss_growth` is the resident memory at the end over that after the first tenth, and the last two have the error's name
and `seconds`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.shared.report import finish
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan.budget import fixed_bytes
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.manifest import FLASH_FILE
from tests.support.artifacts import Recipe, build_artifact, small_spec

OFF, PASSING, LASTING_ERROR, FLIPPED_BIT = range(4)
FAULTS = {"short": 50, "interrupted": 70, "error": 5000, "slow": 500}
"""One in so many reads meets it; an error is far from the next, since what fails twice is an error."""
SLOW_US = 10_000
PROMPTS, TOKENS_OF_A_PROMPT, TOKENS_OF_A_BUDGET = 8, 64, 16
SHARES = (1.0, 0.3, 0.6, 0.05, 0.8)
"""Of the DRAM for units, in turn."""
TIMEOUT_S = 1800


class Control:
    """The page shared with the reads; its layout is that of `struct Control`."""

    def __init__(self, path: Path) -> None:
        """Maps the page."""
        self._words = np.memmap(path, np.int64, "r+", shape=(13,))

    def watch(self, file: Path) -> None:
        """Takes the file whose reads misbehave, and how often each fault comes."""
        found = file.stat()
        self._words[1:3] = found.st_dev, found.st_ino
        self._words[3:8] = *FAULTS.values(), SLOW_US

    def enter(self, mode: int) -> None:
        """From now on reads are as `mode` says."""
        self._words[0] = mode

    @property
    def met(self) -> dict[str, int]:
        """Faults so far, by kind."""
        return dict(zip(FAULTS, self._words[9:13].tolist(), strict=True))


def compile_reads(folder: Path) -> Path:
    """The library that is put before the C library."""
    library = folder / "faulty_reads.so"
    source = Path(__file__).parent / "shared" / "faulty_reads.c"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def resident_bytes() -> int:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def prompts() -> list[list[int]]:
    """Different beginnings."""
    random = np.random.default_rng(5)
    return [random.integers(3, 90, 4).tolist() for _ in range(PROMPTS)]


def undisturbed(session: Session) -> list[list[int]]:
    """The tokens of every prompt."""
    return [list(session.generate(prompt, TOKENS_OF_A_PROMPT, ignore_eos=True).token_ids) for prompt in prompts()]


class Soak:
    """The disturbed run."""

    def __init__(self, session: Session, expected: list[list[int]]) -> None:
        """`expected` are the tokens of every prompt."""
        self._session, self._expected = session, expected
        self._fixed = fixed_bytes(session.artifact.manifest, session.plan)
        self._units = session.plan.dram_budget_bytes - self._fixed
        self.tokens = self.different = self.resizes = 0
        self.resident: list[int] = []

    def run(self, num_tokens: int) -> None:
        """Prompt after prompt until there are so many tokens."""
        while self.tokens < num_tokens:
            for prompt, expected in zip(prompts(), self._expected, strict=True):
                found: list[int] = []
                for token in self._session.stream(prompt, TOKENS_OF_A_PROMPT, ignore_eos=True):
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
            self.resident.append(resident_bytes())

    @property
    def rss_growth(self) -> float:
        """Resident memory at the end over that after the first tenth."""
        return self.resident[-1] / self.resident[len(self.resident) // 10]


def failing(session: Session, control: Control, mode: int, expected: list[int]) -> dict[str, object]:
    """What a device that fails for good leads to, and whether the session goes on when it does not any more."""
    session.resize(fixed_bytes(session.artifact.manifest, session.plan))  # nothing cached, so that every token reads
    control.enter(mode)
    start = time.perf_counter()
    try:
        session.generate(prompts()[0], TOKENS_OF_A_PROMPT, ignore_eos=True)
        error = "none"
    except ColdpressError as raised:
        error = type(raised).__name__
    seconds = time.perf_counter() - start
    control.enter(OFF)
    again = session.generate(prompts()[0], TOKENS_OF_A_PROMPT, ignore_eos=True).token_ids
    return {"error": error, "seconds": seconds, "goes_on": list(again) == expected}


def child(path: Path, page: Path, num_tokens: int) -> None:
    """All runs, in the process whose reads misbehave."""
    control = Control(page)
    with Session(path, flash="direct") as session:
        expected = undisturbed(session)
        control.watch(path / FLASH_FILE)
        control.enter(PASSING)
        soak = Soak(session, expected)
        soak.run(num_tokens)
        met = control.met
        control.enter(OFF)
        figures = {
            "tokens": soak.tokens,
            "different": soak.different,
            "met": met,
            "resizes": soak.resizes,
            "rss_growth": soak.rss_growth,
            "lasting_error": failing(session, control, LASTING_ERROR, expected[0]),
            "flipped_bit": failing(session, control, FLIPPED_BIT, expected[0]),
        }
    print(json.dumps(figures))


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        path, page = arguments.child
        child(path, page, arguments.tokens)
        return
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        folder = Path(temporary).resolve()
        spec = small_spec(hidden_size=128, intermediate_size=1024, max_position_embeddings=128)
        recipe = Recipe(spec=spec, method="relu", context_length=128, slots_share=0.5)
        built = build_artifact(folder / "a", recipe)
        page = folder / "page"
        page.write_bytes(bytes(4096))
        environment = os.environ | {"LD_PRELOAD": str(compile_reads(folder)), "FAULTY_READS": str(page)}
        command = [sys.executable, "-m", "benchmarks.soak", "--child", str(built.path), str(page)]
        command += ["--tokens", str(arguments.tokens)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True)
    finish(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
