"""Measures what codes lose in one plane and in both: how they are chosen, and how many units a token refines.

All units of the MLP have the coarse plane of their codes. Each token refines a share of them in each layer: those with
the largest inner activation, computed from the coarse planes, times the norm of their down column. Refined units use
both planes in gate, up and down. Attention, embeddings and head stay as they are in the source. Codes are rounded to
nearest (`rtn`), chosen by GPTQ for both planes together (`gptq`), or for each of the two (`nested`); Gram matrices come
from calibration text. Everything is compared with the source model on test text; errors are standard errors over
blocks. Speed is not measured here.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cases import MODELS, Case, Replaced, case_of
from benchmarks.shared.grams import grams_of
from coldpress.compiler.activity.forward import LoadedLayer
from coldpress.compiler.activity.variants import compare
from coldpress.compiler.block_statistics import standard_error
from coldpress.compiler.stages.quantize import gptq, rtn
from coldpress.compiler.stages.quantize._weights import Weights, weights_of
from coldpress.compiler.stages.quantize.nested import nested_codes
from coldpress.runtime.plugins import names
from coldpress.runtime.quantization._planes import PlanesFormat, planes_of
from coldpress.schemas.model import MLP_ROLES, Model

CODES = ("rtn", "gptq", "nested")
PLANES = tuple(name for name in names("coldpress.runtime.quantization") if planes_of(name))
CALIBRATION_BLOCKS = 32


@dataclass(frozen=True)
class InPlanes:
    """A matrix, float32 in Hugging Face's order, by one plane and by both."""

    coarse: np.ndarray
    both: np.ndarray


class Refined(Replaced):
    """A model whose MLPs are coarse but for the units that each token refines."""

    def __init__(self, model: Model, matrices: Mapping[str, InPlanes], share: float, threads: int) -> None:
        """Takes every matrix of the MLPs by role, and the share of a layer's units that a token refines."""
        super().__init__(model, {role: one.both for role, one in matrices.items()}, threads)
        self._planes, self._share = matrices, share

    def load_layer(self, layer: int, block_tokens: int) -> LoadedLayer:
        """Returns the layer with another MLP."""
        import torch

        loaded = super().load_layer(layer, block_tokens)
        mlp: Any = loaded.module.mlp
        roles = {role: self._planes[f"layers.{layer}.{role}.weight"] for role in MLP_ROLES}
        coarse = {role: torch.from_numpy(one.coarse) for role, one in roles.items()}
        fine = {role: torch.from_numpy(one.both - one.coarse) for role, one in roles.items()}
        norms = coarse["down_proj"].norm(dim=0)
        count = round(self._share * len(norms))

        def forward(x: Any) -> Any:
            gate, up = x @ coarse["gate_proj"].T, x @ coarse["up_proj"].T
            inner = mlp.act_fn(gate) * up
            refined = torch.zeros_like(inner, dtype=torch.bool)
            refined.scatter_(-1, (inner.abs() * norms).topk(count, dim=-1).indices, True)
            whole = mlp.act_fn(gate + x @ fine["gate_proj"].T) * (up + x @ fine["up_proj"].T)
            inner = torch.where(refined, whole, inner)
            return inner @ coarse["down_proj"].T + (inner * refined) @ fine["down_proj"].T

        mlp.forward = forward
        return loaded


def in_planes(case: Case, planes: PlanesFormat, codes: str, grams: Mapping[str, np.ndarray]) -> dict[str, InPlanes]:
    """Returns every matrix of the MLPs by role, in the slices that a unit over the inner activation has."""
    found = {}
    for role, inputs in grams.items():
        weights = weights_of(case.model, role, "column" if "down_proj" in role else "row", inputs)
        chosen = codes_of(weights, planes, codes)
        one = planes.decode(planes.split(chosen)[0], weights.length)
        both = planes.whole.decode(chosen, weights.length)
        turned = (one, both) if weights.axis == "row" else (one.T, both.T)
        found[role] = InPlanes(*map(np.ascontiguousarray, turned))
    return found


def codes_of(weights: Weights, planes: PlanesFormat, codes: str) -> np.ndarray:
    """Returns codes of the plain format, chosen as CODES says."""
    if codes == "nested":
        return nested_codes(weights, planes)
    return {"rtn": rtn, "gptq": gptq}[codes].Plugin().quantize(weights, planes.WHOLE)


@dataclass
class Prepared:
    """A model, its Gram matrices, and its hidden states on test text."""

    case: Case
    grams: Mapping[str, np.ndarray]
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
        return Prepared(case, grams_of(case), case.stream.last_hidden(case.splits["test"]))


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m", "prose7m-relu"), smoke=("stories260k",), full=tuple(MODELS), choices=MODELS, help="models"
    )
    planes: tuple[str, ...] = option(
        ("int4_2_2", "int4_3_1"), smoke=("int4_2_2",), full=PLANES, choices=PLANES, help="formats in planes"
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
        "rows[].planes": "format in planes",
        "rows[].codes": "how codes are chosen",
        "rows[].share": "share of a layer's units that a token refines; 1 is the plain format",
        "rows[].kl": "KL divergence from the source, mean over tokens, nats",
        "rows[].kl_error": "standard error of kl over blocks",
        "rows[].ppl_ratio": "perplexity over that of the source",
        "coarse_kl_over_rtn?": "kl of the coarse plane alone, nested over rtn, median over models and planes; null "
        "without both",
        "whole_kl_over_rtn?": "the same of both planes",
    }
    needs_data = True
    over = {"model": "models", "planes": "planes", "codes": "codes"}
    full_minutes = 40

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per share."""
        name, planes = cell["model"], planes_of(cell["planes"])
        assert planes is not None
        at = self.once(name, lambda: Prepared.of(name, self.folder / name, self.options.test_blocks))
        case, tokens = at.case, at.case.splits["test"]
        matrices = in_planes(case, planes, cell["codes"], at.grams)
        for share in self.options.shares:
            refined = Refined(case.model, matrices, share, case.stream.threads).last_hidden(tokens)
            found = compare(case.stream, tokens, at.whole, refined)
            divergence = found.kld[0].mean(axis=1)
            yield {
                "share": share,
                "kl": float(divergence.mean()),
                "kl_error": standard_error(divergence),
                "ppl_ratio": math.exp((found.nll[0] - found.whole_nll).mean()),
            }

    def figures(self, rows: Rows) -> Figures:
        kl = {(row["model"], row["planes"], row["share"], row["codes"]): row["kl"] for row in rows}

        def over_rtn(share: float) -> float | None:
            pairs = [(kl.get((*key[:3], "nested")), kl[key]) for key in kl if key[2:] == (share, "rtn")]
            ratios = [nested / plain for nested, plain in pairs if nested is not None]
            return statistics.median(ratios) if ratios else None

        return {"coarse_kl_over_rtn": over_rtn(0.0), "whole_kl_over_rtn": over_rtn(1.0)}


if __name__ == "__main__":
    main("planes")
