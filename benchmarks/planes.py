"""Measures what codes lose in one plane and in both: how they are chosen, and how many units a token refines.

All units of the MLP have the coarse plane of their codes. Each token refines a share of them in each layer: those with
the largest inner activation, computed from the coarse planes, times the norm of their down column. Refined units use
both planes in gate, up and down. The model runs as in `explore`, but attention stays as it is in the source, as
embeddings and head do. Codes are rounded to nearest (`rtn`), chosen by GPTQ for both planes together (`gptq`), or for
each of the two (`nested`); Gram matrices come from calibration text. Everything is compared with the source model on
test text; errors are standard errors over blocks. Speed is not measured here. In `by_layer` half of the layers have
the planes of int4_3_1 and half those of int4_2_2, so that DRAM holds as much as halfway between the two: the build's
rule chooses the layers (compiler/stages/explore/gains.py), by the first blocks of calibration text.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cases import MODELS, Case, case_of
from benchmarks.shared.grams import gram_of
from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.in_planes import InPlanes, in_model
from coldpress.compiler.activity.unit_statistics import unit_norms
from coldpress.compiler.activity.variants import Variant, compare, last_hidden
from coldpress.compiler.block_statistics import standard_error
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.rounding._weights import Algorithm
from coldpress.compiler.stages.allocate._mixtures import mixture
from coldpress.compiler.stages.explore.gains import layer_gains
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization._planes import planes_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.curves import LayerGains
from coldpress.schemas.families import WHOLE_MLP, Formats, format_at
from coldpress.schemas.gram import GramMatrices

CODES = ("rtn", "gptq", "nested")
PLANES = tuple(name for name in names("coldpress.runtime.quantization") if planes_of(name))
BY_LAYER = "by_layer"
MIXED = ("int4_2_2", "int4_3_1")
CALIBRATION_BLOCKS, GAIN_BLOCKS = 32, 8


class MlpInPlanes(InPlanes):
    """A model with units in planes whose attention stays as it is in the source."""

    def _of_role(self, role: str) -> Any:
        return LayerStream._of_role(self, role) if self._axis(role) is None else super()._of_role(role)


@dataclass(frozen=True)
class Largest(Choice):
    """Refines the units with the largest inner activation times the norm of their down column."""

    share: float
    """Of a layer's units."""

    def mask(self, layer: int, family: str, activity: np.ndarray) -> np.ndarray:
        """See `Choice`."""
        units, chosen = activity.shape[1], np.zeros(activity.shape, bool)
        order = (np.abs(activity) * self.arrays[layer, family]["norms"]).argsort(axis=1)
        np.put_along_axis(chosen, order[:, units - round(self.share * units) :], True, axis=1)
        return chosen


@dataclass
class Prepared:
    """A model, its Gram matrices, and its hidden states on test text."""

    case: Case
    gram: GramMatrices
    whole: Any

    @staticmethod
    def of(name: str, folder: Path, test_blocks: int) -> "Prepared":
        """Loads a model and calibrates it."""
        fit = slice(0, CALIBRATION_BLOCKS)
        case = case_of(
            name,
            folder,
            {"calibration": ("fit", fit), "validation": ("fit", fit), "test": ("test", slice(0, test_blocks))},
        )
        return Prepared(case, gram_of(case), case.stream.last_hidden(case.splits["test"]))


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m", "prose7m-relu"), smoke=("stories260k",), full=tuple(MODELS), choices=MODELS, help="models"
    )
    planes: tuple[str, ...] = option(
        (*MIXED, BY_LAYER),
        smoke=(*MIXED, BY_LAYER),
        full=(*PLANES, BY_LAYER),
        choices=(*PLANES, BY_LAYER),
        help="formats in planes, and both by layer",
    )
    codes: tuple[str, ...] = option(CODES, choices=CODES, help="how codes are chosen")
    shares: tuple[float, ...] = option(
        (0.0, 0.05, 0.1, 0.2, 1.0),
        smoke=(0.0, 1.0),
        full=(0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0),
        help="shares of a layer's units that a token refines",
    )
    test_blocks: int = option(16, smoke=2, full=64, help="blocks of 256 tokens of test text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "model",
        "rows[].planes": "format in planes; by_layer for int4_2_2 with int4_3_1 in half of the layers",
        "rows[].finer_share?": "share of the layers with the planes of int4_3_1; null beside these two formats",
        "rows[].codes": "how codes are chosen",
        "rows[].share": "share of a layer's units that a token refines; 1 is the plain format",
        "rows[].kl": "KL divergence from the source, mean over tokens, nats",
        "rows[].kl_error": "standard error of kl over blocks",
        "rows[].ppl_ratio": "perplexity over that of the source",
        "coarse_kl_over_rtn?": "kl of the coarse plane alone, nested over rtn, median over models and planes; null "
        "without both",
        "whole_kl_over_rtn?": "the same of both planes",
        "by_layer_over_chord?": "kl by layer over that between its two formats in equal DRAM, median over models, "
        "codes, and shares up to a half; null without all three",
    }
    needs_data = True
    over = {"model": "models", "planes": "planes", "codes": "codes"}
    full_minutes = 40

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per share."""
        name, planes = cell["model"], cell["planes"]
        at = self.once(name, lambda: Prepared.of(name, self.folder / name, self.options.test_blocks))
        case, tokens, spec = at.case, at.case.splits["test"], at.case.model.spec
        rounding = Rounding(load("coldpress.compiler.rounding", Algorithm, cell["codes"]), at.gram)
        formats = self._by_layer(case, rounding) if planes == BY_LAYER else planes
        finer = sum(format_at(formats, layer) == MIXED[1] for layer in range(spec.num_hidden_layers))
        running = MlpInPlanes(case.stream, formats, (WHOLE_MLP,), rounding)
        refine = load("coldpress.runtime.sparsity", Selector, "refine")
        norms = {
            (layer, WHOLE_MLP): {"norms": unit_norms(case.model, layer, "mlp_mid")}
            for layer in range(spec.num_hidden_layers)
        }
        variants = [
            Variant(in_model(Largest(refine, norms, spec, share)), (WHOLE_MLP,)) for share in self.options.shares
        ]
        found = compare(case.stream, tokens, at.whole, last_hidden(running, tokens, variants))
        for number, share in enumerate(self.options.shares):
            divergence = found.kld[number].mean(axis=1)
            yield {
                "finer_share": None if planes not in (*MIXED, BY_LAYER) else finer / spec.num_hidden_layers,
                "share": share,
                "kl": float(divergence.mean()),
                "kl_error": standard_error(divergence),
                "ppl_ratio": math.exp((found.nll[number] - found.whole_nll).mean()),
            }

    def _by_layer(self, case: Case, rounding: Rounding) -> Formats:
        """Returns the finer planes in the half of the layers that gain the most by them."""
        tokens = case.splits["validation"][:GAIN_BLOCKS]
        per_layer = layer_gains(case.stream, tokens, MIXED, (WHOLE_MLP,), rounding).tolist()
        gains = LayerGains(coarser=MIXED[0], finer=MIXED[1], per_layer=tuple(per_layer))
        return mixture(gains, len(per_layer) // 2)

    def figures(self, rows: Rows) -> Figures:
        kl = {(row["model"], row["planes"], row["share"], row["codes"]): row["kl"] for row in rows}

        def over_rtn(share: float) -> float | None:
            pairs = [(kl.get((*key[:3], "nested")), kl[key]) for key in kl if key[2:] == (share, "rtn")]
            ratios = [nested / plain for nested, plain in pairs if nested is not None]
            return statistics.median(ratios) if ratios else None

        def over_chord() -> float | None:
            ratios: list[float] = []
            for row in (row for row in rows if row["planes"] == BY_LAYER and row["share"] <= 0.5):
                one, other = (kl.get((row["model"], name, row["share"], row["codes"])) for name in MIXED)
                if one is not None and other is not None:
                    ratios.append(row["kl"] / (one + row["finer_share"] * (other - one)))
            return statistics.median(ratios) if ratios else None

        return {
            "coarse_kl_over_rtn": over_rtn(0.0),
            "whole_kl_over_rtn": over_rtn(1.0),
            "by_layer_over_chord": over_chord(),
        }


if __name__ == "__main__":
    main("planes")
