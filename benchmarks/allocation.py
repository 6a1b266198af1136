"""Perplexity on test text by the rule that divides a density among families and layers.

`python -m benchmarks.allocation [--models …] [--densities …] [--rules …] [--attention] [--tokens N] …`. The
inputs of all matrices of the MLP are pruned; the density counts all its bytes. Rules work as in a build: thresholds
are fitted on calibration text, losses are measured on N tokens of it, validation text decides where a rule lets it,
and what is scored is test text. `uniform` of `dip` is that selector's own line. The last line is {rows: [{model,
method, rule, asked, density, ppl, shares}], worst_gain, median_gain}, where `density` counts weights and gains are
the share of `uniform`'s loss of log perplexity that `greedy` saves.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.evaluation.evaluate import Sparse, evaluate
from benchmarks.shared.cases import MODELS, Case, Parts, case_of
from benchmarks.shared.report import finish, show
from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.layer_counts import Activity
from coldpress.compiler.activity.unit_statistics import fit_all
from coldpress.compiler.cost_model import read_units, unit_bytes
from coldpress.compiler.io import Workspace
from coldpress.compiler.profiles import load_device
from coldpress.compiler.stages.allocate._rules import AllocationConfig, Inputs, Method, allocated
from coldpress.runtime.plugins import load, names, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations

SPLITS: Parts = {
    "calibration": ("fit", slice(0, 64)),
    "validation": ("fit", slice(64, 72)),
    "test": ("test", slice(0, 32)),
}
FAMILIES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
FORMAT = "int4_group32"


def method_of(name: str, case: Case, inputs: Inputs, attention: bool) -> Method:
    """A selector with its default options, or for attention's matrices, too."""
    selector, spec = load("coldpress.runtime.sparsity", Selector, name), case.model.spec
    options = options_of(selector, {"attention": True} if attention else {})
    sizes = {family: unit_bytes(family, spec, FORMAT) for family in selector.families(spec, options)}
    reads = {family: read_units(inputs.device.flash, size, 1) for family, size in sizes.items()}
    return Method(name, selector, options, sizes, reads)


def row_of(case: Case, inputs: Inputs, method: Method, config: AllocationConfig, density: float) -> dict[str, Any]:
    """What one rule makes of a density."""
    shares = allocated(config, inputs, method, density)
    arrays = fit_all(method.selector, method.options, shares, case.model.spec, method.statistics(inputs))
    found = evaluate(case.stream, case.splits["test"], Sparse(method.selector, tuple(shares), arrays))
    rounded = {family: [round(share, 3) for share in per_layer] for family, per_layer in shares.items()}
    return {"model": case.name, "method": method.name, "rule": config.density_allocation, "asked": density} | {
        "density": found.mlp_density,
        "ppl": found.ppl,
        "shares": rounded,
    }


def rows_of(case: Case, activations: Activations, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per method, density and rule, the dense model first."""
    nll, count = case.stream.nll(case.splits["test"])
    yield {
        "model": case.name,
        "method": "dense",
        "rule": "",
        "asked": 1.0,
        "density": 1.0,
        "ppl": math.exp(nll / count),
    }
    device = load_device(Path("profiles/devices/pixel6.yaml"))
    for name in arguments.methods:
        for density in arguments.densities:
            for rule in arguments.rules:
                work = Workspace(case.folder / f"{name}-{density}-{rule}", "benchmark")
                inputs = Inputs(case.model, activations, device, work, case.corpus(), case.stream.threads)
                config = AllocationConfig(
                    density_allocation=rule, allocation_tokens=arguments.tokens, compute_device="cpu"
                )
                yield row_of(case, inputs, method_of(name, case, inputs, arguments.attention), config, density)


def gains(rows: list[dict[str, Any]]) -> list[float]:
    """Share of the loss by `uniform`, in log perplexity, that `greedy` saves."""
    ppl = {(row["model"], row["method"], row["asked"], row["rule"]): row["ppl"] for row in rows}
    dense = {row["model"]: row["ppl"] for row in rows if row["method"] == "dense"}
    return [
        math.log(value / ppl[model, method, asked, "greedy"]) / math.log(value / dense[model])
        for (model, method, asked, rule), value in ppl.items()
        if rule == "uniform" and (model, method, asked, "greedy") in ppl
    ]


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["prose7m", "tinystories656k", "stories260k"], choices=list(MODELS)
    )
    parser.add_argument("--methods", nargs="+", default=["topk", "dip", "threshold", "flash"])
    parser.add_argument("--densities", nargs="+", type=float, default=[0.6, 0.5, 0.4, 0.3])
    parser.add_argument("--rules", nargs="+", default=list(names("coldpress.compiler.stages.allocate")))
    parser.add_argument("--attention", action="store_true", help="prune attention's matrices, too, by the same density")
    parser.add_argument("--tokens", type=int, default=AllocationConfig().allocation_tokens, metavar="N")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            case = case_of(name, Path(folder), SPLITS)
            work = Workspace(case.folder / "calibrate", "benchmark")
            nothing = Activity(frozenset())
            activations = count_activity(
                PassConfig(), case.model, case.corpus(), FAMILIES, nothing, work, case.stream.threads
            )
            for row in rows_of(case, activations, arguments):
                print(json.dumps(row), flush=True)
                rows.append(row)
    cells = {(row["model"], row["method"], row["rule"], row["asked"]): row["ppl"] for row in rows}
    found = dict.fromkeys((row["model"], row["method"], row["rule"]) for row in rows)
    table = [
        [*key, *(cells.get((*key, at), cells.get((*key, 1.0), math.nan)) for at in arguments.densities)]
        for key in found
    ]
    columns = ["model", "method", "rule", *map(str, arguments.densities)]
    show("perplexity on test text, by density of the MLP", columns, table)
    saved = gains(rows)
    summary = {"worst_gain": min(saved), "median_gain": statistics.median(saved)} if saved else {}
    finish({"rows": rows} | summary)


if __name__ == "__main__":
    main()
