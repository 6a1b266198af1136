"""PowerInfer's placement program at the size of OPT-175B: seconds, proven gap, two solvers, and global top-k beside it.

`python -m benchmarks.place [--device pc-high]`. 96 layers of 49,152 neurons in int4, batches of 64 (73,728 of
them), split between the device's accelerator and its DRAM. Activation counts over 8,192 tokens follow a power law in
each layer, with skews from 0.4 to 1.6 and densities from 2 to 20 %. The profile's T_sync is scaled up row by row, until
C_l (Eq. 4) binds in most layers, as on a slower link or with smaller units. Global top-k is what the published engine's
solver amounts to; it is shown with the layers that Eq. 7 forbids given up, and with their room filled again ("mended").
The last row adds flash as a third tier. solve_s is the slowest row of two tiers, building the model included; gap is
the largest; small_cases problems are held to enumeration by both solvers.
"""

import argparse
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.shared.report import finish, show
from coldpress.compiler.profiles import load_device
from coldpress.compiler.stages.place import _solve
from coldpress.compiler.stages.place._problem import Group, Problem, make_group, units_of
from coldpress.compiler.stages.place._program import Solver
from coldpress.compiler.stages.place._tiers import min_units, worth
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import int4_group32
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.placement import Tier
from tests.contracts.test_place import brute_force, problem_of
from tests.support.data import ROOT

NUM_LAYERS, NUM_NEURONS, HIDDEN_SIZE, NUM_TOKENS = 96, 49152, 12288, 8192
BATCH_UNITS = 64
UNIT_BYTES = 2 * int4_group32.Plugin().nbytes(HIDDEN_SIZE)
GAP = 1e-5
SYNC_FACTORS = (1, 10, 30, 100, 150)
NUM_SMALL_CASES = 40
COLUMNS = (
    "T_sync",
    "C_l",
    "layers used",
    "top-k breaks Eq. 7 in",
    "top-k",
    "mended top-k",
    "ILP",
    "over top-k",
    "over mended",
    *(f"{solver} s" for solver in names("coldpress.compiler.stages.place")),
    "gap",
    "apart",
)


def counts_of(seed: int) -> list[np.ndarray]:
    """Per layer int64 [NUM_NEURONS], counts of a power law; deeper layers are less skewed."""
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, NUM_NEURONS + 1) / NUM_NEURONS
    found: list[np.ndarray] = []
    for layer in range(NUM_LAYERS):
        density, skew = rng.uniform(0.02, 0.2), 1.6 - 1.2 * layer / NUM_LAYERS
        weights = ranks**-skew
        shares = np.minimum(0.98, weights * density / weights.mean())
        found.append(rng.permutation(rng.binomial(NUM_TOKENS, shares)).astype(np.int64))
    return found


def with_sync(device: DeviceProfile, factor: float) -> DeviceProfile:
    """The device with a slower synchronization."""
    if device.accelerator is None:
        raise SystemExit(f"device {device.name} has no accelerator; name one that has")
    sync = device.accelerator.sync_s
    slower = sync.model_copy(update={"value": sync.value * factor})
    return device.model_copy(update={"accelerator": device.accelerator.model_copy(update={"sync_s": slower})})


def make_problem(counts: list[np.ndarray], device: DeviceProfile, tiers: tuple[Tier, ...]) -> Problem:
    """The whole problem in the device's bytes; a third tier gets a tenth of the units' bytes as DRAM."""
    if device.accelerator is None:
        raise SystemExit(f"device {device.name} has no accelerator; name one that has")
    least, weights = min_units(UNIT_BYTES, tiers, device), worth(UNIT_BYTES, tiers, device)
    groups = tuple(
        make_group(layer, "neuron", values, UNIT_BYTES, least, BATCH_UNITS, weights)
        for layer, values in enumerate(counts)
    )
    total = NUM_LAYERS * NUM_NEURONS * UNIT_BYTES
    fast = (device.accelerator.memory_bytes.value,)
    if tiers[-1] == "flash":
        return Problem(groups, (*fast, total // 10))
    return Problem(groups, fast, device.dram_budget_bytes.value)


@dataclass(frozen=True)
class Solved:
    """One solver's answer and the seconds it took, the model built anew."""

    solution: _solve.Solution
    seconds: float


def solve(counts: list[np.ndarray], device: DeviceProfile, tiers: tuple[Tier, ...]) -> dict[str, Solved]:
    """From counts to a placement, by each solver."""
    found: dict[str, Solved] = {}
    for solver in names("coldpress.compiler.stages.place"):
        started = time.perf_counter()
        problem = make_problem(counts, device, tiers)
        solution = _solve.search(problem, load("coldpress.compiler.stages.place", Solver, solver), GAP)
        found[solver] = Solved(solution, time.perf_counter() - started)
    return found


def top_k(groups: tuple[Group, ...], room_bytes: int, banned: frozenset[int]) -> list[int]:
    """Batches per group of the globally hottest ones that fit, groups in `banned` left out."""
    steps = np.concatenate([np.diff(group.values) * (group.layer not in banned) for group in groups])
    owner = np.repeat(np.arange(len(groups)), [group.num_batches for group in groups])
    chosen = np.argsort(-steps, kind="stable")[: room_bytes // groups[0].batch_bytes]
    return np.bincount(owner[chosen][steps[chosen] > 0], minlength=len(groups)).tolist()


def broken(groups: tuple[Group, ...], taken: list[int]) -> list[int]:
    """Groups that have some batches, but fewer than C_l."""
    pairs = zip(groups, taken, strict=True)
    return [group.layer for group, count in pairs if 0 < count * group.batch_units < group.min_units[0]]


def allowed_value(groups: tuple[Group, ...], taken: list[int]) -> int:
    """Impact of what Eq. 7 allows: a layer with fewer units costs more than it saves, so it is given up."""
    lost = broken(groups, taken)
    return sum(int(g.values[count]) for g, count in zip(groups, taken, strict=True) if g.layer not in lost)


def mended_top_k(groups: tuple[Group, ...], room_bytes: int) -> list[int]:
    """Top-k again and again, each time without the layer that is furthest below C_l, until none is."""
    banned: frozenset[int] = frozenset()
    while lost := broken(groups, taken := top_k(groups, room_bytes, banned)):
        banned |= {min(lost, key=lambda layer: taken[layer])}
    return taken


@dataclass(frozen=True)
class Row:
    """One T_sync: what top-k reaches, and the solvers."""

    factor: float
    min_units: int
    layers_used: int
    layers_broken: int
    top_k: int
    mended: int
    solved: dict[str, Solved]

    @property
    def best(self) -> int:
        """The program's objective, by the default solver."""
        return self.solved["pulp_highs"].solution.value

    def cells(self) -> list[object]:
        """The row as it is printed."""
        impacts = [found / NUM_TOKENS for found in (self.top_k, self.mended, self.best)]
        over = [f"{100 * (self.best / max(1, found) - 1):+.4f} %" for found in (self.top_k, self.mended)]
        head = [f"x {self.factor}", self.min_units, self.layers_used, self.layers_broken]
        return [*head, *impacts, *over, *solver_cells(self.solved)]


def two_tiers(counts: list[np.ndarray], device: DeviceProfile, factor: float) -> Row:
    """The program and top-k under a T_sync that is `factor` times the profile's."""
    tiers: tuple[Tier, ...] = ("accelerator", "dram")
    slower = with_sync(device, factor)
    solved, problem = solve(counts, slower, tiers), make_problem(counts, slower, tiers)
    groups, room = problem.groups, problem.fast_bytes[0]
    taken = top_k(groups, room, frozenset())
    choices = solved["pulp_highs"].solution.choices
    return Row(
        factor=factor,
        min_units=groups[0].min_units[0],
        layers_used=sum(units_of(*pair, 0) > 0 for pair in zip(groups, choices, strict=True)),
        layers_broken=len(broken(groups, taken)),
        top_k=allowed_value(groups, taken),
        mended=allowed_value(groups, mended_top_k(groups, room)),
        solved=solved,
    )


def solver_cells(solved: dict[str, Solved]) -> list[object]:
    """Seconds, the largest gap, and how far the solvers are apart."""
    return [*(found.seconds for found in solved.values()), f"{largest_gap(solved):.1e}", f"{apart(solved):.1e}"]


def largest_gap(solved: dict[str, Solved]) -> float:
    """The largest proven gap of the solvers."""
    return max(found.solution.gap for found in solved.values())


def apart(solved: dict[str, Solved]) -> float:
    """Relative distance of the solvers' objectives."""
    values = [found.solution.value for found in solved.values()]
    return (max(values) - min(values)) / max(values)


def small_cases() -> int:
    """How many small problems both solvers solve as enumeration does; stops at the first that they do not."""
    done = 0
    for seed in range(NUM_SMALL_CASES):
        problem = problem_of(seed, 3, 1 + seed % 3, 1 + seed % 2, bounded=seed % 4 == 0)
        best = brute_force(problem)
        for solver in names("coldpress.compiler.stages.place") if best >= 0 else ():
            found = _solve.search(problem, load("coldpress.compiler.stages.place", Solver, solver), 0.0).value
            if found != best:
                raise SystemExit(f"case {seed}: {solver} found {found}, enumeration {best}")
        done += best >= 0
    return done


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="pc-high", help="a device profile with an accelerator")
    device = load_device(ROOT / "profiles" / "devices" / f"{parser.parse_args().device}.yaml")
    num_cases, counts = small_cases(), counts_of(0)
    rows = [two_tiers(counts, device, factor) for factor in SYNC_FACTORS]
    three = solve(counts, device, ("accelerator", "dram", "flash"))
    cells = [row.cells() for row in rows]
    cells.append(["three tiers", *[""] * 8, *solver_cells(three)])
    show(f"{NUM_LAYERS} layers of {NUM_NEURONS} neurons, {device.name}; impact per token", COLUMNS, cells)
    everything = [*(row.solved for row in rows), three]
    finish(
        {
            "solve_s": max(row.solved["pulp_highs"].seconds for row in rows),
            "cp_sat_s": max(row.solved["cp_sat"].seconds for row in rows),
            "three_tiers_s": three["pulp_highs"].seconds,
            "gap": max(map(largest_gap, everything)),
            "solvers_agree": all(apart(solved) <= GAP for solved in everything),
            "gains_where_it_binds": [row.best / row.top_k - 1 for row in rows if row.layers_broken],
            "gains_over_mended": [row.best / row.mended - 1 for row in rows if row.layers_broken],
            "small_cases": num_cases,
        }
    )


if __name__ == "__main__":
    main()
