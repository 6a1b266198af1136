"""Converts caller-supplied token ids to int64; the decoder checks that the vocabulary has them."""

from collections.abc import Sequence

import numpy as np

from coldpress.runtime.artifact.errors import short
from coldpress.schemas.errors import ColdpressError, clipped


def token_array(prompt_ids: Sequence[int]) -> np.ndarray:
    """Converts a prompt's ids, Python's or numpy's integers, to int64 [n]. Raises `ColdpressError` if an id is not a
    whole number, or does not fit into 64 bits."""
    for place, given in enumerate[object](prompt_ids):  # what callers give may be anything
        if isinstance(given, bool) or not isinstance(given, int | np.integer):
            raise ColdpressError(
                f"token id {short(given)} at place {place} of a prompt is of type {type(given).__name__}, expected a "
                "whole number; give ids of this artifact's vocabulary"
            )
    try:
        return np.array([int(given) for given in prompt_ids], np.int64)
    except OverflowError as error:
        largest = clipped(str(max(map(int, prompt_ids), key=abs)))
        raise ColdpressError(
            f"token id {largest} is outside any vocabulary, expected ids of this artifact's"
        ) from error
