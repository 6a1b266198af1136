"""Measures what codes lose in one plane and in both: how they are chosen, and how many units a token refines.

All units of the MLP have the coarse plane of their codes. Each token refines a share of them in each layer: those with
the largest inner activation, computed from the coarse planes, times the norm of their down column. Refined units use
both planes in gate, up and down. The model runs as in `explore`, but attention stays as it is in the source, as
embeddings and head do. Codes are rounded to nearest (`rtn`), chosen by GPTQ for both planes together (`gptq`), or for
each of the two (`nested`); Gram matrices come from calibration text. Everything is compared with the source model on
test text; errors are standard errors over blocks. Speed is not measured here. In `by_layer` half of the layers have
the planes of int4_3_1 and half those of int4_2_2, so that DRAM holds as much as halfway between the two, and in
`by_matrix` half of the matrices: the build's rule chooses them (compiler/quality/gains.py), by the first blocks
of calibration text.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cases import MODELS, Case, case_of
from benchmarks.shared.grams import gram_of
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.in_planes import InPlanes
from coldpress.compiler.activity.variants import Variant, compare, last_hidden
from coldpress.compiler.block_statistics import standard_error
from coldpress.compiler.quality.gains import largest, matrix_gains
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.rounding._weights import Algorithm
from coldpress.compiler.stages.allocate._mixtures import mixture
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization._planes import planes_of
from coldpress.schemas.curves import LayerGains
from coldpress.schemas.families import WHOLE_MLP, Formats, layer_format, slice_formats
from coldpress.schemas.gram import GramMatrices

CODES = ("rtn", "gptq", "nested")
PLANES = tuple(name for name in names("coldpress.runtime.quantization") if planes_of(name))
BY_LAYER, BY_MATRIX = "by_layer", "by_matrix"
MIXED = ("int4_2_2", "int4_3_1")
MIXTURES = (BY_LAYER, BY_MATRIX)
CALIBRATION_BLOCKS, GAIN_BLOCKS = 32, 1


class MlpInPlanes(InPlanes):
    """A model with units in planes whose attention stays as it is in the source."""

    def _of_role(self, role: str) -> Any:
        return LayerStream._of_role(self, role) if self._axis(role) is None else super()._of_role(role)


@dataclass
class Prepared:
    """A model, its Gram matrices, and its hidden states on test text."""

    case: Case
    gram: GramMatrices
    whole: Any
    gains: dict[str, LayerGains] = field(default_factory=dict[str, LayerGains])
    """By how codes are chosen: what matrices gain by finer planes."""

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

    def mixed(self, planes: str, rounding: Rounding) -> Formats:
        """Returns the finer planes in the half of the layers, or of the matrices, that gain the most by them."""
        if rounding.name not in self.gains:
            tokens = self.case.splits["validation"][:GAIN_BLOCKS]
            found = matrix_gains(self.case.stream, tokens, MIXED, rounding).tolist()
            per_layer = tuple(map(tuple, found))
            self.gains[rounding.name] = LayerGains(coarser=MIXED[0], finer=MIXED[1], per_layer=per_layer)
        gains = self.gains[rounding.name]
        gains = gains.of_layers if planes == BY_LAYER else gains
        return mixture(gains, sum(map(len, gains.rows)) // 2)


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m", "prose7m-relu"), smoke=("stories260k",), full=tuple(MODELS), choices=MODELS, help="models"
    )
    planes: tuple[str, ...] = option(
        (*MIXED, *MIXTURES),
        smoke=(*MIXED, *MIXTURES),
        full=(*PLANES, *MIXTURES),
        choices=(*PLANES, *MIXTURES),
        help="formats in planes, and both by layer and by matrix",
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
        "rows[].planes": "format in planes; by_layer for int4_2_2 with int4_3_1 in half of the layers, by_matrix "
        "in half of the matrices",
        "rows[].finer_share?": "share of the matrices with the planes of int4_3_1; null beside these two formats",
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
        "by_matrix_over_chord?": "the same by matrix",
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
        formats = at.mixed(planes, rounding) if planes in MIXTURES else planes
        names = [slice_formats(layer_format(formats, layer)) for layer in range(spec.num_hidden_layers)]
        finer = statistics.fmean(own.count(MIXED[1]) / len(own) for own in names)
        running = MlpInPlanes(case.stream, formats, (WHOLE_MLP,), rounding)
        variants = [Variant(largest(case.model, share), (WHOLE_MLP,)) for share in self.options.shares]
        found = compare(case.stream, tokens, at.whole, last_hidden(running, tokens, variants))
        for number, share in enumerate(self.options.shares):
            divergence = found.kld[number].mean(axis=1)
            yield {
                "finer_share": None if planes not in (*MIXED, *MIXTURES) else finer,
                "share": share,
                "kl": float(divergence.mean()),
                "kl_error": standard_error(divergence),
                "ppl_ratio": math.exp((found.nll[number] - found.whole_nll).mean()),
            }

    def figures(self, rows: Rows) -> Figures:
        kl = {(row["model"], row["planes"], row["share"], row["codes"]): row["kl"] for row in rows}

        def over_rtn(share: float) -> float | None:
            pairs = [(kl.get((*key[:3], "nested")), kl[key]) for key in kl if key[2:] == (share, "rtn")]
            ratios = [nested / plain for nested, plain in pairs if nested is not None]
            return statistics.median(ratios) if ratios else None

        def over_chord(planes: str) -> float | None:
            ratios: list[float] = []
            for row in (row for row in rows if row["planes"] == planes and row["share"] <= 0.5):
                one, other = (kl.get((row["model"], name, row["share"], row["codes"])) for name in MIXED)
                if one is not None and other is not None:
                    ratios.append(row["kl"] / (one + row["finer_share"] * (other - one)))
            return statistics.median(ratios) if ratios else None

        return {
            "coarse_kl_over_rtn": over_rtn(0.0),
            "whole_kl_over_rtn": over_rtn(1.0),
            "by_layer_over_chord": over_chord(BY_LAYER),
            "by_matrix_over_chord": over_chord(BY_MATRIX),
        }


if __name__ == "__main__":
    main("planes")
