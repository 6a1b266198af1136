"""Estimates what a format costs a matrix: rounds some of its rows, and weighs the errors by its sensitivity."""

from collections.abc import Mapping, Sequence

import numpy as np

from coldpress.compiler.activity.sensitivity import Sensitivity
from coldpress.compiler.rounding._matrix import Rounding, choose_codes
from coldpress.compiler.rounding._weights import Weights
from coldpress.runtime.kernels.products import decode_rows
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import Model

SAMPLE_ROWS = 512
"""Rows of a matrix that are rounded: rows differ little beside the formats."""


def expected_divergence(
    rounding: Rounding, model: Model, role: str, sensitivity: Sensitivity, formats: Sequence[FormatName]
) -> Mapping[FormatName, float]:
    """Returns the divergence, in nats per token, that each format of a matrix is expected to cause by itself.

    Raises:
        CheckpointError: if a value is beyond a format's range.
    """
    weights = rounding.weights(model, role, "row")
    at = np.unique(np.linspace(0, weights.count - 1, min(weights.count, SAMPLE_ROWS)).astype(np.int64))
    rows = weights.read(0, weights.count)[at]
    # without the source's own codes, which are those of all rows
    sample = Weights(
        len(rows), weights.length, "row", lambda start, stop: rows[start:stop], weights.gram, weights.importance
    )
    by_row = sensitivity.outputs[at].astype(np.float64)
    by_row *= sensitivity.outputs.sum(dtype=np.float64) / max(by_row.sum(), np.finfo(np.float64).tiny)
    return {name: float(by_row @ _errors(rounding, sample, role, name, sensitivity.inputs)) for name in formats}


def _errors(rounding: Rounding, sample: Weights, role: str, name: FormatName, inputs: np.ndarray) -> np.ndarray:
    """Returns each row's squared error, weighted by the sensitivity to inputs, float64 [rows]."""
    codes = choose_codes(rounding.algorithm, sample, role, name)
    errors = decode_rows(codes, sample.length, name, num_threads=1) - sample.read(0, sample.count)
    return (errors.astype(np.float64) ** 2) @ inputs.astype(np.float64)
