"""Cache-aware masking: perplexity and modelled tokens per second by gamma, against DIP with other caches (DIP Fig. 11).

`python -m tests.benchmarks.dip_ca [--models …] [--device pixel6] [--blocks N]`. The model is in the loop: a choice sees
what its layer's cache holds, token by token, in blocks one after another, the first of which warm the caches and are
not scored. Inputs of the MLP are pruned at half of its weights (DIP's division), a layer's cache holds a third of its
units, and units are as large as a 7B's in int4. A token takes the flash time of what it misses. `dip` is run with each
policy at several densities; a curve is linear in log perplexity. The last line has `throughput_gain_at_equal_ppl`, by
policy: the fastest `dip_ca` at the perplexity that DIP has at half of the weights, over DIP with that policy, and
`rows`.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from compiler.evaluate import CacheSettings, Sparse, evaluate
from compiler.profiles import load_device
from compiler.reads import Placed, Reading
from runtime._plugins import load, options_of
from runtime.planner import Strided
from runtime.store import MAX_READ_BYTES
from schemas.families import num_units
from tests.benchmarks import sparsity
from tests.benchmarks._cases import MODELS, Case, case_of
from tests.benchmarks._report import finish, show

UNIT_BYTES = {"mlp_in": 2 * 11008 * 18 // 32, "mlp_mid": 4096 * 18 // 32}
GAMMAS = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)
DENSITIES = (0.4, 0.5, 0.6)
POLICIES = ("lru", "lfu", "static")
SLOTS_SHARE = 1 / 3
WARM_UP_BLOCKS = 1
Row = dict[str, Any]


def run(case: Case, tokens: np.ndarray, device: str, policy: str, density: float, gamma: float) -> Row:
    """One point."""
    spec, selector = case.model.spec, load("runtime.sparsity", "dip_ca")
    options = options_of(selector, {"gamma": gamma})
    arrays, placed = {}, {}
    for family, share in selector.divide(density, spec, options).items():
        for layer in range(spec.num_hidden_layers):
            units, size = num_units(family, spec), UNIT_BYTES[family]
            arrays[layer, family] = selector.fit(units, share, {}, options)
            placed[layer, family] = Placed(Strided(0, size, size), np.arange(units))
    flash = load_device(Path("profiles/devices") / f"{device}.yaml").flash
    reading = Reading(flash, flash.break_even_gap_bytes // 4, MAX_READ_BYTES, False, placed)
    slots = {family: round(SLOTS_SHARE * num_units(family, spec)) for family in UNIT_BYTES}
    sparse = Sparse(selector, tuple(UNIT_BYTES), arrays)
    found = evaluate(case.stream, tokens, sparse, CacheSettings(policy, slots), WARM_UP_BLOCKS, reading)
    row = {"policy": policy, "density": density, "gamma": gamma, "ppl": found.ppl}
    row |= {"hit_rate": found.hits / (found.hits + found.misses)}
    return row | {"tokens_per_s": tokens[WARM_UP_BLOCKS:].size / found.flash_s}


def speed_at(rows: list[Row], ppl: float) -> float:
    """Tokens per second where a curve has that perplexity; NaN outside of it."""
    points = sorted((math.log(row["ppl"]), math.log(row["tokens_per_s"])) for row in rows)
    x, y = zip(*points, strict=True)
    return math.exp(float(np.interp(math.log(ppl), x, y))) if x[0] <= math.log(ppl) <= x[-1] else math.nan


def gains(rows: list[Row], ppl: float) -> dict[str, float]:
    """By policy: the fastest cache-aware curve, one per gamma below 1, over DIP with that policy."""
    aware = [[row for row in rows if row["policy"] == "lru" and row["gamma"] == gamma] for gamma in GAMMAS[:-1]]
    best = max((speed for curve in aware if not math.isnan(speed := speed_at(curve, ppl))), default=math.nan)
    plain = {policy: [row for row in rows if row["policy"] == policy and row["gamma"] == 1] for policy in POLICIES}
    return {policy: best / speed_at(curve, ppl) for policy, curve in plain.items()}


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tinystories656k"], choices=list(MODELS))
    parser.add_argument("--device", default="pixel6")
    parser.add_argument("--blocks", type=int, default=5, help="of 256 tokens of test text, the warm-up among them")
    arguments = parser.parse_args()
    rows: list[Row] = []
    found: dict[str, dict[str, float]] = {}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            case = case_of(name, Path(folder), sparsity.SPLITS)
            case.stream.threads = 1
            tokens = case.splits["test"][: arguments.blocks]
            points = [("lru", gamma) for gamma in GAMMAS] + [(policy, 1.0) for policy in POLICIES[1:]]
            own: list[Row] = []
            for policy, gamma in points:
                for density in DENSITIES:
                    own.append(run(case, tokens, arguments.device, policy, density, gamma))
                    print(json.dumps({"model": name} | own[-1]), flush=True)
            target = next(row["ppl"] for row in own if (row["density"], row["gamma"]) == (0.5, 1.0))
            found[name] = gains(own, target)
            rows += [{"model": name} | row for row in own]
    columns = ["model", "policy", "density", "gamma", "ppl", "hit_rate", "tokens_per_s"]
    show("dip_ca by gamma (1 is dip)", columns, [[row[column] for column in columns] for row in rows])
    finish({"throughput_gain_at_equal_ppl": found, "rows": rows})


if __name__ == "__main__":
    main()
