"""What Python itself costs: calls, functions and files of one request for units, and microseconds of processor time of
a request that hits everything and of a token.

A tiny top-k artifact decodes with all units in DRAM ("hits") and with an eighth of them ("reads"). Calls are traced: a
request is all that a layer's MLP does for one of its families, from its input to its output, which are two requests;
files and functions are the product's own, and calls also count with those of libraries. `--before` measures another
checkout with the interpreter of its .venv, in turns with this one, and prints both and their ratio; it may be older
than this benchmark, which calls nothing but `Session` and what both have under one of two names.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from types import FrameType
from typing import Any

import numpy as np

from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import small_spec

ROOT = Path.cwd()
CASES = {"hits": 1.0, "reads": 0.125}
"""Share of the units in DRAM."""
BEGINS, ENDS = ("apply", "begin"), ("apply", "result")
"""Functions of the module of the MLP that it begins and ends with, before and after the loop was told on a page."""
FAMILY, FEW_UNITS = "mlp_in", 16
OWN = ("calls", "functions", "files")


def artifact_of(folder: Path, case: str) -> Path:
    """A tiny artifact of two families in 12 layers."""
    share = {"pinned_share": CASES[case], "slots_share": 0.0} if case == "hits" else {"slots_share": CASES[case]}
    recipe = Recipe(small_spec(hidden_act="silu"), "topk", format="int8_group32", **{"pinned_share": 0.0} | share)
    return build_artifact(folder / case, recipe).path


def traced(session: Session) -> dict[str, float]:
    """Means over the requests of a decoded token."""
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
                requests.append({})  # the second family's begins
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
    """Microseconds of processor time of this thread that `work` takes: the least of several rounds.

    Processor time, since other work on the machine would count in wall time.
    """
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(repeats):
            work()
        found.append((time.thread_time() - start) / repeats)
    return 1e6 * min(found)


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """The figures of this process's checkout, by case."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        for case in CASES:
            with Session(artifact_of(Path(folder), case)) as session:
                session.decoder.begin(32)
                session.decoder.prefill(np.arange(4))
                for token in range(4):
                    session.decoder.decode(token)
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
    """One request for units that are in DRAM, and its batches, by whichever name the store has for it."""
    store: Any = session.store
    ids = np.arange(FEW_UNITS, dtype=np.int32)
    if hasattr(store, "submit"):
        return lambda: deque(store.submit((3, FAMILY), ids), maxlen=0)
    return lambda: deque(store.fetch(3, FAMILY, ids), maxlen=0)


def elsewhere(checkout: Path, rounds: int) -> dict[str, dict[str, float]]:
    """The figures of another checkout, in a process of its own interpreter."""
    run = f"import runpy, sys; sys.path.insert(0, '.'); sys.argv = ['request', '--one', '--rounds', '{rounds}']; "
    command = [
        checkout / ".venv/bin/python",
        "-c",
        f"{run}runpy.run_path({str(Path(__file__))!r}, run_name='__main__')",
    ]
    done = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="PATH", help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of a turn; the fastest counts")
    parser.add_argument("--turns", type=int, default=3, help="turns of each checkout; the median counts")
    parser.add_argument("--smoke", action="store_true", help="one round and one turn")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds, turns = (1, 1) if arguments.smoke else (arguments.rounds, arguments.turns)
    if arguments.one:
        print(json.dumps(measure(rounds)))
        return
    from benchmarks.shared.report import finish, show  # which another checkout may not have

    checkouts = {"before": arguments.before, "after": ROOT} if arguments.before else {"after": ROOT}
    found = [{name: elsewhere(path.resolve(), rounds) for name, path in checkouts.items()} for _ in range(turns)]
    figures = {
        name: {
            case: {what: median(turn[name][case][what] for turn in found) for what in found[0][name][case]}
            for case in CASES
        }
        for name in checkouts
    }
    names = sorted({what for by_case in figures.values() for each in by_case.values() for what in each})
    show(
        f"one request of a tiny top-k artifact, median of {turns} turns",
        ["checkout", "case", *names],
        (
            [name, case, *(each.get(what, "") for what in names)]
            for name, c in figures.items()
            for case, each in c.items()
        ),
    )
    ratios = {}
    if arguments.before:
        ratios = {
            case: {what: value / figures["before"][case][what] for what, value in figures["after"][case].items()}
            for case in CASES
        }
    finish({**figures, "after_over_before": ratios})


if __name__ == "__main__":
    main()
