"""Solves PowerInfer's placement program for OPT-175B: seconds and proven gap, beside global top-k.

It has 96 layers of 49,152 neurons in int4, in batches of 64 (73,728 of them), split as in the paper between a device's
accelerator, which stands for the stage's DRAM, and its DRAM, which stands for the flash. Activation counts over 8,192
tokens follow a power law in each layer, with skews from 0.4 to 1.6 and densities from 2 to 20 %. The profile's T_sync
is scaled up row by row, until C_l (Eq. 4) binds in most layers, as on a slower link or with smaller units. The
published engine's solver amounts to global top-k; it is shown with the layers that Eq. 7 forbids given up, and with
their room filled again ("mended").
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from coldpress.compiler.stages.place._program import Group, Problem, Solution, least_units, make_group, search, units_of
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.quantization import int4_group32
from coldpress.schemas.device import Accelerator, DeviceProfile
from coldpress.schemas.errors import ColdpressError

NUM_NEURONS, HIDDEN_SIZE, NUM_TOKENS = 49152, 12288, 8192
BATCH_UNITS = 64
UNIT_BYTES = 2 * int4_group32.Plugin().nbytes(HIDDEN_SIZE)
GAP = 1e-5


def counts_of(seed: int, num_layers: int) -> list[np.ndarray]:
    """Returns counts of a power law per layer, int64 [NUM_NEURONS]; deeper layers are less skewed."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, NUM_NEURONS + 1) / NUM_NEURONS
    found: list[np.ndarray] = []
    for layer in range(num_layers):
        density, skew = rng.uniform(0.02, 0.2), 1.6 - 1.2 * layer / num_layers
        weights = ranks**-skew
        shares = np.minimum(0.98, weights * density / weights.mean())
        found.append(rng.permutation(rng.binomial(NUM_TOKENS, shares)).astype(np.int64))
    return found


def with_sync(device: DeviceProfile, factor: float) -> DeviceProfile:
    """Returns the device with `factor` times its synchronization time."""
    accelerator = accelerator_of(device)
    slower = accelerator.sync_s.model_copy(update={"value": accelerator.sync_s.value * factor})
    return device.model_copy(update={"accelerator": accelerator.model_copy(update={"sync_s": slower})})


def accelerator_of(device: DeviceProfile) -> Accelerator:
    """Returns the device's accelerator, the first tier."""
    if device.accelerator is None:
        raise ColdpressError(f"device {device.name} has no accelerator; name a device that has one")
    return device.accelerator


def make_problem(counts: list[np.ndarray], device: DeviceProfile) -> Problem:
    """Returns the whole problem in the device's bytes."""
    fast = accelerator_of(device)
    fast_s, slow_s = UNIT_BYTES / fast.bytes_per_s.value, UNIT_BYTES / device.dram_bytes_per_s.value  # Eq. 5
    least = least_units(fast_s, slow_s, fast.sync_s.value)
    groups = [
        make_group(number, "neuron", values, UNIT_BYTES, least, BATCH_UNITS) for number, values in enumerate(counts)
    ]
    return Problem(tuple(groups), fast.memory_bytes.value)


def solve(counts: list[np.ndarray], device: DeviceProfile) -> tuple[Problem, Solution, float]:
    """Solves the placement from counts; returns the seconds, making the problem included, too."""
    started = time.perf_counter()
    problem = make_problem(counts, device)
    solution = search(problem, GAP)
    return problem, solution, time.perf_counter() - started


def top_k(groups: tuple[Group, ...], room_bytes: int, banned: frozenset[int]) -> list[int]:
    """Returns the batches per group of the globally hottest ones that fit; groups in `banned` get none."""
    steps = np.concatenate([np.diff(group.values) * (group.layer not in banned) for group in groups])
    owner = np.repeat(np.arange(len(groups)), [group.num_batches for group in groups])
    chosen = np.argsort(-steps, kind="stable")[: room_bytes // groups[0].batch_bytes]
    return np.bincount(owner[chosen][steps[chosen] > 0], minlength=len(groups)).tolist()


def broken(groups: tuple[Group, ...], taken: list[int]) -> list[int]:
    """Returns the groups that have some batches, but fewer than C_l."""
    pairs = zip(groups, taken, strict=True)
    return [group.layer for group, count in pairs if 0 < count * group.batch_units < group.min_units]


def allowed_value(groups: tuple[Group, ...], taken: list[int]) -> int:
    """Returns the impact that Eq. 7 allows: a layer with fewer units costs more than it saves, so it is given up."""
    lost = broken(groups, taken)
    return sum(int(g.values[count]) for g, count in zip(groups, taken, strict=True) if g.layer not in lost)


def mended_top_k(groups: tuple[Group, ...], room_bytes: int) -> list[int]:
    """Repeats top-k, each time without the layer that is furthest below C_l, until no layer is below."""
    banned: frozenset[int] = frozenset()
    while lost := broken(groups, taken := top_k(groups, room_bytes, banned)):
        banned |= {min(lost, key=lambda layer: taken[layer])}
    return taken


@dataclass(frozen=True)
class Options:
    device: str = option("pc-high", help="a device profile with an accelerator")
    layers: int = option(96, smoke=4, help="layers of the model")
    sync_factors: tuple[int, ...] = option((1, 10, 30, 100, 150), smoke=(1, 150), help="multiples of T_sync")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].min_units": "least number of units that a layer may have in the accelerator, C_l (Eq. 4)",
        "rows[].layers_used": "layers with units in the accelerator, as the program places them",
        "rows[].layers_broken": "layers to which global top-k gives some units, but fewer than Eq. 7 allows",
        "rows[].top_k": "impact per token in the accelerator by global top-k, without the layers that it breaks",
        "rows[].mended": "impact per token in the accelerator by mended top-k",
        "rows[].best": "impact per token in the accelerator by the program's solution",
        "rows[].solve_s": "seconds to the solution, building the program included",
        "rows[].gap": "proven relative distance to the optimum",
        "solve_s": "seconds to the solution, slowest row",
        "gap": "largest proven gap of all rows",
        "gains_where_it_binds?": "best over top_k, minus 1, of each row in which global top-k breaks Eq. 7",
        "gains_over_mended?": "best over mended, minus 1, of each row in which global top-k breaks Eq. 7",
    }
    over = ({"factor": "sync_factors"},)
    full_minutes = 1

    def measure(self, cell: Cell) -> Iterator[Row]:
        device = load_device(self.options.device)
        counts = self.once("counts", lambda: self._counts(device))
        yield measured(counts, with_sync(device, cell["factor"]))

    def _counts(self, device: DeviceProfile) -> list[np.ndarray]:
        counts = counts_of(0, self.options.layers)
        solve(counts[:1], device)  # the solver's first program waits for its imports
        return counts

    def figures(self, rows: Rows) -> Figures:
        binding = [row for row in rows if row["layers_broken"]]
        return {
            "solve_s": max(row["solve_s"] for row in rows),
            "gap": max(row["gap"] for row in rows),
            "gains_where_it_binds": [row["best"] / row["top_k"] - 1 for row in binding],
            "gains_over_mended": [row["best"] / row["mended"] - 1 for row in binding],
        }


def measured(counts: list[np.ndarray], device: DeviceProfile) -> Row:
    """Returns the row of the program and of top-k on one device."""
    problem, solution, seconds = solve(counts, device)
    groups, room = problem.groups, problem.dram_bytes
    taken = top_k(groups, room, frozenset())
    return {
        "min_units": groups[0].min_units,
        "layers_used": sum(units_of(*pair) > 0 for pair in zip(groups, solution.choices, strict=True)),
        "layers_broken": len(broken(groups, taken)),
        "top_k": allowed_value(groups, taken) / NUM_TOKENS,
        "mended": allowed_value(groups, mended_top_k(groups, room)) / NUM_TOKENS,
        "best": solution.value / NUM_TOKENS,
        "solve_s": seconds,
        "gap": solution.gap,
    }


if __name__ == "__main__":
    main("place")
