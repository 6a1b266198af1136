"""Threshold: the units whose |signal| reaches the level of their layer and family (TEAL; DIP 3.1, "per layer").

Reads what top-k reads: the vector that the units multiply. The level comes from the magnitudes that calibration counted
in the dense model, so any density is to be had from one pass; a token uses as many units as reach the level, and the
share that a text uses is the density on average. The level is above zero, so an entry that is exactly zero never
reaches it. Where no entry reaches the level, a token uses the largest alone, which adds nothing if all are zero.
"""

from collections.abc import Mapping

import numpy as np

from coldpress.runtime.sparsity import DensitySource, Kept, Residency, topk
from coldpress.runtime.sparsity._magnitudes import threshold
from coldpress.schemas.base import Record
from coldpress.schemas.model import ModelSpec

CHOOSES: tuple[str, ...] = ("up_down", "gate_down", "mlp_in", "mlp_mid", "attn_in", "attn_out")
KEPT: Mapping[str, Kept] = {"threshold": Kept("float32")}
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = False
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(topk.Options):
    """What is pruned: the same as with top-k."""


def families(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    """The inputs of all linear layers of the MLP, and of attention if that is asked for."""
    return topk.families(spec, options)


def densities(exact_zeros: bool) -> DensitySource:
    """A choice."""
    return "budget"


def fit(num_units: int, density: float, statistics: Mapping[str, np.ndarray], options: Record) -> dict[str, np.ndarray]:
    """`threshold` float32 [1].

    Raises:
        ColdpressError: if `statistics` has no magnitudes.
    """
    return {"threshold": np.array([threshold(statistics, density)], np.float32)}


def select(signal: np.ndarray, arrays: Mapping[str, np.ndarray], residency: Residency) -> np.ndarray:
    """Ids of the entries of `signal` float32 [num_units] that reach the threshold, int32 ascending, at least one."""
    return np.flatnonzero(select_many(signal[None], arrays)[0]).astype(np.int32)


def select_many(activity: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Where |activity| reaches the threshold, else the largest of a token: float32 [T, num_units] -> bool alike."""
    magnitude = np.abs(activity)
    chosen = magnitude >= arrays["threshold"][0]
    empty = np.flatnonzero(~chosen.any(axis=1))
    chosen[empty, magnitude[empty].argmax(axis=1)] = True
    return chosen
