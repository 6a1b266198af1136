"""Counts and times the requests of a tiny artifact in the checkout that is the working folder; prints one JSON object.

benchmarks/request.py runs this file, also inside checkouts that are older than it: it imports only `Session`, test
support, and names that both have.
"""

import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any

import numpy as np

from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import small_spec

ROOT = Path.cwd()
CASES = {"hits": 1.0, "reads": 0.125}
"""Case -> share of the units in DRAM."""
BEGINS, ENDS = ("apply", "begin"), ("apply", "result")
"""Functions of the MLP's module that begin and end its work on a layer, by their older and newer names."""
FAMILY, FEW_UNITS = "mlp_in", 16


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
        if event == "call" and is_mlp and code.co_name in BEGINS and not inside:
            inside = True
            requests.append({})
        if event == "call" and inside:
            if code.co_name == "residency" and len(requests[-1]) and "residency" in {name for _, name in requests[-1]}:
                requests.append({})  # the second family's request begins
            key = code.co_filename, code.co_name
            requests[-1][key] = requests[-1].get(key, 0) + 1
        if event == "return" and is_mlp and code.co_name in ENDS:
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


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Returns the figures of this process's checkout, by case."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        for case in CASES:
            with Session(artifact_of(Path(folder), case)) as session:
                session.decoder.begin(32)
                session.decoder.prefill(np.arange(4))
                for number in range(4):
                    session.decoder.decode(number)
                figures = traced(session)
                length = session.decoder.length

                def token(session: Session = session, length: int = length) -> None:
                    session.decoder.decode(9)
                    session.decoder.roll_back(length)

                figures["token_us"] = least_us(token, rounds, 5)
                if case == "hits":
                    figures["request_us"] = least_us(_request(session), rounds, 100)
            found[case] = figures
    return found


def _request(session: Session) -> Callable[[], object]:
    """Returns a call of one request for units in DRAM and its batches, under this checkout's name for it."""
    store: Any = session.store
    ids = np.arange(FEW_UNITS, dtype=np.int32)
    if hasattr(store, "submit"):
        return lambda: deque(store.submit((3, FAMILY), ids), maxlen=0)
    return lambda: deque(store.fetch(3, FAMILY, ids), maxlen=0)


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
