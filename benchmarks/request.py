"""Measures what Python costs: calls, functions and files of a request, processor time of a request and a token.

A tiny top-k artifact decodes with all units in DRAM ("hits") and with an eighth of them ("reads"). Calls are traced: a
request covers all work of a layer's MLP for one of its two families, from input to output. Files and functions are the
product's; calls are also counted with those of libraries.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from types import FrameType
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option, spread
from benchmarks.harness.apart import apart
from benchmarks.harness.places import ROOT
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import small_spec

CASES = {"hits": 1.0, "reads": 0.125}
"""Case -> share of the units in DRAM."""
FAMILY, FEW_UNITS = "mlp_in", np.arange(16, dtype=np.int32)
FIGURES = {
    "requests": "requests of a token",
    "calls": "calls of the product's functions in a request",
    "functions": "functions of the product in a request",
    "files": "files of the product in a request",
    "calls_with_libraries": "calls in a request, those of libraries included",
    "token_us": "microseconds of processor time of a token, the least of the rounds",
    "request_us?": "microseconds of a request that hits everything, the least of the rounds",
}


@dataclass(frozen=True)
class Options:
    rounds: int = option(10, smoke=1, help="rounds of a turn; the fastest counts")
    turns: int = option(5, smoke=1, full=9, help="turns, each in its own process")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].case": "hits: all units in DRAM; reads: an eighth",
        **{f"rows[].{name}": meaning for name, meaning in FIGURES.items()},
        **{f"after.*.{name}": f"{meaning}; by case, over the turns" for name, meaning in FIGURES.items()},
    }
    is_timing = True
    over = {"case": tuple(CASES), "turn": "turns"}
    full_minutes = 2

    def measure(self, cell: Cell) -> Iterator[Row]:
        case = cell["case"]
        path = self.once(case, lambda: artifact_of(self.folder, case))
        yield apart(self, "cost", str(path), case == "hits")

    def cost(self, path: str, hits: bool) -> Row:
        """Returns the figures of an artifact; runs in a new process."""
        with Session(path) as session, np.errstate(all="ignore"):
            decoder = session.decoder
            decoder.begin(32)
            decoder.prefill(np.arange(4))
            for number in range(4):
                decoder.decode(number)
            figures, length = traced(session), decoder.length

            def token() -> None:
                decoder.decode(9)
                decoder.roll_back(length)

            def request() -> None:
                deque(session.store.submit((3, FAMILY), FEW_UNITS), maxlen=0)

            figures["token_us"] = least_us(token, self.options.rounds, 5)
            if hits:
                figures["request_us"] = least_us(request, self.options.rounds, 100)
        return figures

    def figures(self, rows: Rows) -> Figures:
        return {"after": {case: medians([row for row in rows if row["case"] == case]) for case in CASES}}


def medians(turns: Rows) -> Row:
    """Returns each figure over the turns: the median of counts, the spread of times."""
    found = {name: [turn[name] for turn in turns] for name in turns[0] if name not in ("turn", "case")}
    return {name: (spread if name.endswith("_us") else median)(samples) for name, samples in found.items()}


def artifact_of(folder: Path, case: str) -> Path:
    """Writes a tiny artifact of two families in 12 layers and returns its path."""
    pinned, slots = (CASES[case], 0.0) if case == "hits" else (0.0, CASES[case])
    spec = small_spec(hidden_act="silu")
    recipe = Recipe(spec, "topk", format="int8_group32", pinned_share=pinned, slots_share=slots)
    return build_artifact(folder / case, recipe).path


def traced(session: Session) -> dict[str, float]:
    """Returns means over the requests of a decoded token."""
    requests: list[dict[tuple[str, str], int]] = []
    inside = False

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        code = frame.f_code
        is_mlp = code.co_filename.endswith("/mlp.py") and "kernels" not in code.co_filename
        if event == "call" and is_mlp and code.co_name == "begin" and not inside:
            inside = True
            requests.append({})
        if event == "call" and inside:
            if code.co_name == "residency" and len(requests[-1]) and "residency" in {name for _, name in requests[-1]}:
                requests.append({})  # the second family's request begins
            key = code.co_filename, code.co_name
            requests[-1][key] = requests[-1].get(key, 0) + 1
        if event == "return" and is_mlp and code.co_name == "result":
            inside = False

    sys.setprofile(see)
    session.decoder.decode(7)
    sys.setprofile(None)
    own = [{key: count for key, count in each.items() if _is_own(key[0])} for each in requests]
    return {
        "requests": len(requests),
        "calls": mean(sum(each.values()) for each in own),
        "functions": mean(map(len, own)),
        "files": mean(len({file for file, _ in each}) for each in own),
        "calls_with_libraries": mean(sum(each.values()) for each in requests),
    }


def _is_own(file: str) -> bool:
    return Path(file).is_relative_to(ROOT) and ".venv" not in file


def least_us(work: Callable[[], object], rounds: int, repeats: int) -> float:
    """Returns the microseconds of this thread's processor time that `work` takes: the least of several rounds.

    It is processor time, since wall time would include other work on the machine.
    """
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(repeats):
            work()
        found.append((time.thread_time() - start) / repeats)
    return 1e6 * min(found)


if __name__ == "__main__":
    main("request")
