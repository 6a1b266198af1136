"""What each mechanism brings, on emulated devices: layers of a 7B with planted activity, one setting more at a step.

`python -m tests.benchmarks.ladder [--cases relu-10 …] [--devices pixel6 …] [--dram 0.1 …] [--scale 0.25] [--layers 2]
[--tokens 12]`, as root. Models are planted (tests/support/planted.py): neurons fire by the topic of the text and by how
hot they are; matrices are int4. `dram` is the share of the bytes on flash that DRAM holds, beside what is always
resident. The steps are those of runtime/_ladder.py, and `+ordering` among them: another artifact of the same model,
whose units lie by planted topic and frequency instead of by their number, what Ripple's order finds in statistics.
Pinned are the units of the highest planted frequency. Units are bundles in all steps: no family without bundles has the
same slices.

Each combination runs in a process of its own under the kernel's caps of the device, scaled by one factor for all; all
steps of it in turn, on the same tokens of one topic, of which the first ones fill the caches and are not counted. A
step that loses is shown and not taken along. The last line is {rows: [{case, device, dram, scale, steps: [{name,
tokens_per_s, gain, total_gain, kept, reads_per_token, read_bytes_per_token, hit_rate, flash_s_per_token}]}],
total_gains: {case: [of each combination]}}.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime import _ladder
from runtime.generate import Session
from tests.benchmarks._emulated import OTHER_BYTES, Task, answered, folder_of, measured_apart, parser, tasks
from tests.benchmarks._planted import ORDERS, plan_of, topic_tokens, write_artifacts
from tests.benchmarks._report import finish, show

ROUNDS = 3


@dataclass(frozen=True)
class Placed(_ladder.Setting):
    """A setting, and which of the case's artifacts it runs on."""

    path: Path


@dataclass(frozen=True)
class Measured:
    """Per decoded token."""

    tokens_per_s: float
    reads_per_token: float
    read_bytes_per_token: float
    hit_rate: float
    flash_s_per_token: float


def measure(setting: Placed, tokens: np.ndarray) -> Measured:
    """Decodes the second passage behind the first, some times over; the run of the median speed."""
    with Session(setting.path, plan=setting.plan, flash=setting.flash) as session:
        session.perplexity(tokens[:1], sparse=True)
        runs = [session.perplexity(tokens[1:], sparse=True).metrics for _ in range(ROUNDS)]
    found = sorted(runs, key=lambda run: run.decode_s)[ROUNDS // 2]
    count = found.num_tokens
    return Measured(
        count / found.decode_s, found.reads / count, found.read_bytes / count, found.hit_rate, found.flash_s / count
    )


def climb(task: Task) -> list[dict[str, Any]]:
    """All steps of a combination, in this process."""
    structural, ordered = (task.folder / f"{task.case}-{order}" for order in ORDERS)
    manifest, plan = plan_of(structural, task.dram)
    first, changes = _ladder.steps(manifest, plan)

    def placed(change: _ladder.Change) -> _ladder.Change:
        def changed(before: Placed) -> Placed:
            setting = change(before)
            return Placed(setting.plan, setting.flash, before.path)

        return changed  # pyright: ignore[reportReturnType]

    steps = [(name, placed(change)) for name, change in changes]
    where = next(number for number, (name, _) in enumerate(steps) if name.startswith("+collapse"))
    steps.insert(where, ("+ordering", lambda before: replace(before, path=ordered)))
    tokens = topic_tokens(task.num_tokens + 2)
    start = Placed(first.plan, first.flash, structural)
    return [as_data(step) for step in _ladder.run(start, steps, lambda setting: measure(setting, tokens))]


def row_of(task: Task, scale: float) -> dict[str, Any]:
    """The row of a combination, measured in a process under the device's caps."""
    budget_bytes = plan_of(task.folder / f"{task.case}-{ORDERS[0]}", task.dram)[1].dram_budget_bytes
    steps, used = measured_apart("tests.benchmarks.ladder", task, scale, budget_bytes + OTHER_BYTES)
    return {"case": task.case, "device": task.device, "dram": task.dram, "scale": used, "steps": steps}


def as_data(step: _ladder.Step) -> dict[str, Any]:
    """A step of the last line."""
    found = asdict(step)
    return found | found.pop("row")


def main() -> None:
    """Prints the table and the figures."""
    arguments = parser(__doc__).parse_args()
    if answered(arguments, climb):
        return
    rows: list[dict[str, Any]] = []
    with folder_of(arguments) as folder:
        for case in arguments.cases:
            if not (folder / f"{case}-{ORDERS[-1]}").exists():
                write_artifacts(case, arguments.layers, folder)
            rows += [row_of(task, arguments.scale) for task in tasks(arguments, case, folder)]
    for row in rows:
        columns = list(row["steps"][0])
        title = f"{row['case']}, {row['device']} × {row['scale']:g}, {row['dram']:.0%} of the units in DRAM"
        show(title, columns, (list(step.values()) for step in row["steps"]))
    totals = {case: [row["steps"][-1]["total_gain"] for row in rows if row["case"] == case] for case in arguments.cases}
    finish({"rows": rows, "total_gains": totals})


if __name__ == "__main__":
    main()
