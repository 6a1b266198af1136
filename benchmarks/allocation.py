"""Compares the rules that divide a density among families and layers, by perplexity on test text.

The inputs of all matrices of the MLP are pruned; the density counts all its bytes. Rules work as in a build: thresholds
are fitted on calibration text, losses are measured on part of it, and validation text decides for the rules that use
it. Test text is scored. `uniform` of `dip` is that selector's own line. A gain is the share of `uniform`'s loss of log
perplexity that `greedy` saves.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.evaluation.evaluate import Sparse, evaluate
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.harness.places import ROOT
from benchmarks.shared.cases import MODELS, Case, case_of
from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.layer_counts import ActivityRule
from coldpress.compiler.activity.unit_statistics import fit_all
from coldpress.compiler.cost_model import all_read_units, unit_bytes
from coldpress.compiler.io import Workspace
from coldpress.compiler.search.density import AllocationConfig, AllocationInputs, Method, allocated
from coldpress.runtime.device_profiles.devices import read_device
from coldpress.runtime.plugins import load, names, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations

SPLITS = {"calibration": ("fit", slice(0, 64)), "validation": ("fit", slice(64, 72))}
FAMILIES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
FORMAT = "int4_group32"
DEVICE = ROOT / "profiles/devices/pixel6.yaml"
RULES = names("coldpress.compiler.density_allocation")


def method_of(name: str, case: Case, inputs: AllocationInputs) -> Method:
    """Returns a selector with its default options."""
    selector, spec = load("coldpress.runtime.sparsity", Selector, name), case.model.spec
    options = options_of(selector, {})
    sizes = {family: unit_bytes(family, spec, FORMAT) for family in selector.families(spec, options)}
    reads = all_read_units(inputs.device.flash, spec, sizes, FORMAT, 1)
    return Method(selector, options, sizes, reads)


def row_of(case: Case, inputs: AllocationInputs, method: Method, config: AllocationConfig, density: float) -> Row:
    """Returns the density, perplexity and shares that one rule gives for an asked density."""
    shares = allocated(config, inputs, method, density)
    arrays = fit_all(method.selector, method.options, shares, case.model.spec, method.statistics(inputs))
    found = evaluate(case.stream, case.splits["test"], Sparse(method.selector, tuple(shares), arrays))
    rounded = {family: [round(share, 3) for share in per_layer] for family, per_layer in shares.items()}
    return {"density": found.mlp_density, "ppl": found.ppl, "shares": rounded}


def calibrated(name: str, folder: Path, test_blocks: int) -> tuple[Case, Activations]:
    """Returns a model with its text, and the activations of one pass over the calibration text."""
    case = case_of(name, folder, SPLITS | {"test": ("test", slice(0, test_blocks))})
    work, nothing = Workspace(folder / "calibrate", "benchmark"), ActivityRule(frozenset())
    return case, count_activity(PassConfig(), case.model, case.corpus(), FAMILIES, nothing, work, case.stream.threads)


def gains(rows: Rows) -> list[float]:
    """Returns, for each case, the share of `uniform`'s loss of log perplexity that `greedy` saves."""
    ppl = {(row["model"], row["method"], row["asked"], row["rule"]): row["ppl"] for row in rows}
    dense = {row["model"]: row["ppl"] for row in rows if row["method"] == "dense"}
    return [
        math.log(value / ppl[model, method, asked, "greedy"]) / math.log(value / dense[model])
        for (model, method, asked, rule), value in ppl.items()
        if rule == "uniform" and (model, method, asked, "greedy") in ppl
    ]


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",),
        smoke=("stories260k",),
        full=("prose7m", "tinystories656k", "stories260k"),
        choices=MODELS,
        help="models to prune",
    )
    methods: tuple[str, ...] = option(
        ("topk", "dip"), smoke=("topk",), full=("topk", "dip", "threshold", "flash"), help="selectors"
    )
    densities: tuple[float, ...] = option((0.5,), full=(0.6, 0.5, 0.4, 0.3), help="used shares of the MLP's bytes")
    rules: tuple[str, ...] = option(RULES, choices=RULES, help="values of density_allocation")
    tokens: int = option(
        1024,
        smoke=256,
        full=AllocationConfig().allocation_tokens,
        help="calibration tokens on which the rules measure losses",
    )
    test_blocks: int = option(12, smoke=2, full=32, help="blocks of 256 tokens of test text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].method": "selector; dense: nothing is pruned",
        "rows[].asked": "density that the rule divides",
        "rows[].rule": "value of density_allocation; empty for the dense model",
        "rows[].density": "share of the MLP's weights that a token of the test text uses, mean over tokens",
        "rows[].ppl": "perplexity on test text",
        "rows[].shares.*?": "density of each layer, by family",
        "worst_gain?": "least share of uniform's loss of log perplexity that greedy saves, of all cases",
        "median_gain?": "median share of uniform's loss of log perplexity that greedy saves, of all cases",
    }
    needs_data = True
    full_minutes = 240

    over = (
        {"model": "models", "method": ("dense",), "asked": (1.0,), "rule": ("",)},
        {"model": "models", "method": "methods", "asked": "densities", "rule": "rules"},
    )

    def measure(self, cell: Cell) -> Iterator[Row]:
        model, name, density, rule = cell["model"], cell["method"], cell["asked"], cell["rule"]
        test_blocks = self.options.test_blocks
        case, activations = self.once(model, lambda: calibrated(model, self.folder / model, test_blocks))
        if name == "dense":
            nll, count = case.stream.nll(case.splits["test"])
            yield {"density": 1.0, "ppl": math.exp(nll / count)}
            return
        work = Workspace(case.folder / f"{name}-{density}-{rule}", "benchmark")
        inputs = AllocationInputs(
            case.model, activations, read_device(DEVICE), work, case.corpus(), case.stream.threads
        )
        config = AllocationConfig(density_allocation=rule, allocation_tokens=self.options.tokens, compute_device="cpu")
        yield row_of(case, inputs, method_of(name, case, inputs), config, density)

    def figures(self, rows: Rows) -> Figures:
        saved = gains(rows)
        return {"worst_gain": min(saved), "median_gain": statistics.median(saved)} if saved else {}


if __name__ == "__main__":
    main("allocation")
