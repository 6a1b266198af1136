"""Solves PowerInfer's placement program for OPT-175B: seconds and proven gap of two solvers, beside global top-k.

It has 96 layers of 49,152 neurons in int4, in batches of 64 (73,728 of them), split between the device's accelerator
and its DRAM. Activation counts over 8,192 tokens follow a power law in each layer, with skews from 0.4 to 1.6 and
densities from 2 to 20 %. The profile's T_sync is scaled up row by row, until C_l (Eq. 4) binds in most layers, as on a
slower link or with smaller units. The published engine's solver amounts to global top-k; it is shown with the layers
that Eq. 7 forbids given up, and with their room filled again ("mended"). The last row adds flash as a third tier.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from coldpress.compiler.stages.place import _solve
from coldpress.compiler.stages.place._problem import Group, Problem, make_group, units_of
from coldpress.compiler.stages.place._program import Solver
from coldpress.compiler.stages.place._tiers import min_units, worth
from coldpress.runtime.plugins import load, names
from coldpress.runtime.profiles.devices import load_device
from coldpress.runtime.quantization import int4_group32
from coldpress.schemas.device import Accelerator, DeviceProfile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.placement import Tier

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


def make_problem(counts: list[np.ndarray], device: DeviceProfile, tiers: tuple[Tier, ...]) -> Problem:
    """Returns the whole problem in the device's bytes; with a third tier, DRAM holds a tenth of the units' bytes."""
    least, weights = min_units(UNIT_BYTES, tiers, device), worth(UNIT_BYTES, tiers, device)
    groups = tuple(
        make_group(layer, "neuron", values, UNIT_BYTES, least, BATCH_UNITS, weights)
        for layer, values in enumerate(counts)
    )
    total = len(counts) * NUM_NEURONS * UNIT_BYTES
    fast = (accelerator_of(device).memory_bytes.value,)
    if tiers[-1] == "flash":
        return Problem(groups, (*fast, total // 10))
    return Problem(groups, fast, device.dram_budget_bytes.value)


@dataclass(frozen=True)
class Solved:
    """One solver's answer and its seconds, making the problem included."""

    solution: _solve.Solution
    seconds: float


def solve(counts: list[np.ndarray], device: DeviceProfile, tiers: tuple[Tier, ...]) -> dict[str, Solved]:
    """Solves the placement from counts, with each solver."""
    found: dict[str, Solved] = {}
    for solver in names("coldpress.compiler.stages.place"):
        started = time.perf_counter()
        problem = make_problem(counts, device, tiers)
        solution = _solve.search(problem, load("coldpress.compiler.stages.place", Solver, solver), GAP)
        found[solver] = Solved(solution, time.perf_counter() - started)
    return found


def top_k(groups: tuple[Group, ...], room_bytes: int, banned: frozenset[int]) -> list[int]:
    """Returns the batches per group of the globally hottest ones that fit; groups in `banned` get none."""
    steps = np.concatenate([np.diff(group.values) * (group.layer not in banned) for group in groups])
    owner = np.repeat(np.arange(len(groups)), [group.num_batches for group in groups])
    chosen = np.argsort(-steps, kind="stable")[: room_bytes // groups[0].batch_bytes]
    return np.bincount(owner[chosen][steps[chosen] > 0], minlength=len(groups)).tolist()


def broken(groups: tuple[Group, ...], taken: list[int]) -> list[int]:
    """Returns the groups that have some batches, but fewer than C_l."""
    pairs = zip(groups, taken, strict=True)
    return [group.layer for group, count in pairs if 0 < count * group.batch_units < group.min_units[0]]


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
        "rows[].tiers": "tiers of memory, the fastest first",
        "rows[].min_units?": "least number of units that a layer may have in the accelerator, C_l (Eq. 4)",
        "rows[].layers_used?": "layers with units in the accelerator, as the program places them",
        "rows[].layers_broken?": "layers to which global top-k gives some units, but fewer than Eq. 7 allows",
        "rows[].top_k?": "impact per token in the accelerator by global top-k, without the layers that it breaks",
        "rows[].mended?": "impact per token in the accelerator by mended top-k",
        "rows[].best?": "impact per token in the accelerator by the program's solution",
        "rows[].pulp_highs_s": "seconds of the default solver, pulp_highs, building the program included",
        "rows[].cp_sat_s": "seconds of the solver cp_sat, building the program included",
        "rows[].gap": "proven relative distance to the optimum, the larger of both solvers'",
        "rows[].apart": "difference of the solvers' objectives over the larger one",
        "solve_s": "seconds of pulp_highs with two tiers, slowest row",
        "cp_sat_s": "seconds of cp_sat with two tiers, slowest row",
        "three_tiers_s": "seconds of pulp_highs with three tiers",
        "gap": "largest proven gap of all rows",
        "solvers_agree": "whether the solvers' objectives differ by at most 1e-5 in all rows",
        "gains_where_it_binds?": "best over top_k, minus 1, of each row in which global top-k breaks Eq. 7",
        "gains_over_mended?": "best over mended, minus 1, of each row in which global top-k breaks Eq. 7",
    }
    over = ({"tiers": ("accelerator dram",), "factor": "sync_factors"}, {"tiers": ("accelerator dram flash",)})
    full_minutes = 1

    def measure(self, cell: Cell) -> Iterator[Row]:
        device = load_device(self.options.device)
        counts = self.once("counts", lambda: self._counts(device))
        if "factor" in cell:
            yield two_tiers(counts, device, cell["factor"])
        else:
            yield solver_figures(solve(counts, device, ("accelerator", "dram", "flash")))

    def _counts(self, device: DeviceProfile) -> list[np.ndarray]:
        counts = counts_of(0, self.options.layers)
        solve(counts[:1], device, ("accelerator", "dram"))  # a solver's first program waits for its imports
        return counts

    def figures(self, rows: Rows) -> Figures:
        two = [row for row in rows if "factor" in row]
        binding = [row for row in two if row["layers_broken"]]
        return {
            "solve_s": max(row["pulp_highs_s"] for row in two),
            "cp_sat_s": max(row["cp_sat_s"] for row in two),
            "three_tiers_s": rows[-1]["pulp_highs_s"],
            "gap": max(row["gap"] for row in rows),
            "solvers_agree": all(row["apart"] <= GAP for row in rows),
            "gains_where_it_binds": [row["best"] / row["top_k"] - 1 for row in binding],
            "gains_over_mended": [row["best"] / row["mended"] - 1 for row in binding],
        }


def two_tiers(counts: list[np.ndarray], device: DeviceProfile, factor: float) -> Row:
    """Returns the row of the program and top-k under a T_sync that is `factor` times the profile's."""
    tiers: tuple[Tier, ...] = ("accelerator", "dram")
    slower = with_sync(device, factor)
    solved, problem = solve(counts, slower, tiers), make_problem(counts, slower, tiers)
    groups, room = problem.groups, problem.fast_bytes[0]
    taken = top_k(groups, room, frozenset())
    choices = solved["pulp_highs"].solution.choices
    return {
        "min_units": groups[0].min_units[0],
        "layers_used": sum(units_of(*pair, 0) > 0 for pair in zip(groups, choices, strict=True)),
        "layers_broken": len(broken(groups, taken)),
        "top_k": allowed_value(groups, taken) / NUM_TOKENS,
        "mended": allowed_value(groups, mended_top_k(groups, room)) / NUM_TOKENS,
        "best": solved["pulp_highs"].solution.value / NUM_TOKENS,
        **solver_figures(solved),
    }


def solver_figures(solved: dict[str, Solved]) -> Row:
    """Returns the seconds of each solver, the largest proven gap, and the relative distance of their objectives."""
    values = [found.solution.value for found in solved.values()]
    return {
        **{f"{name}_s": found.seconds for name, found in solved.items()},
        "gap": max(found.solution.gap for found in solved.values()),
        "apart": (max(values) - min(values)) / max(values),
    }


if __name__ == "__main__":
    main("place")
