"""Prunes weights of the MLP once, for all tokens: rows of the tables that are not selectors.

The score is Wanda's (Sun et al. 2024, Eq. 1): a weight's magnitude times the norm of its input on calibration text,
compared among the inputs of one output. Norms are those of the dense model, of all layers at once.
"""

from collections.abc import Mapping

import numpy as np

from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.schemas.model import MLP_ROLES, Model

KEPT, OF = 2, 4
"""Kept weights of each group of consecutive ones in a row, as on NVIDIA's sparse tensor cores."""


def pruned(
    model: Model, norms: Mapping[str, np.ndarray], density: float, semi_structured: bool
) -> dict[str, np.ndarray]:
    """Returns role -> the matrix with zeros, float32 in the checkpoint's order, of every matrix of the MLPs.

    Args:
        model: The checkpoint.
        norms: Role -> norms of its inputs, float32 [inputs].
        density: Share of each row that is kept; a half for 2:4.
        semi_structured: Whether two of every four are kept, rather than any of a row.
    """
    found = {}
    for role in model.tensors:
        if role.split(".")[-2] in MLP_ROLES and role.endswith(".weight"):
            weight = read_role(model, role)
            score = np.abs(weight) * norms[role]
            keep = _of_four(score) if semi_structured else _of_row(score, round(density * weight.shape[1]))
            found[role] = np.where(keep, weight, np.float32(0))
    return found


def _of_row(score: np.ndarray, count: int) -> np.ndarray:
    """Returns a mask of the `count` highest scores of each row; of equal ones the first."""
    keep = np.zeros(score.shape, bool)
    np.put_along_axis(keep, np.argsort(-score, axis=1, kind="stable")[:, :count], True, axis=1)
    return keep


def _of_four(score: np.ndarray) -> np.ndarray:
    rows, inputs = score.shape
    return _of_row(score.reshape(-1, OF), KEPT).reshape(rows, inputs)
