"""Reads activation counts from the packed bits: for all tokens, and for the first ones.

A family that is always used (density 1) needs no bits: every token counts all its units.
"""

import numpy as np

from coldpress.compiler.activity.held_out import activity, always_used
from coldpress.compiler.activity.packed_bits import population
from coldpress.schemas.activations import Activations
from coldpress.schemas.families import FamilyName, num_units
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import Sparsity

Counts = dict[tuple[int, FamilyName], np.ndarray]
"""int64 [num_units] per layer and family."""


def all_counts(spec: ModelSpec, activations: Activations, sparsity: Sparsity) -> Counts:
    """Returns counts over all tokens (Eq. 1).

    Raises:
        ColdpressError: if a family has no counts.
    """
    found: Counts = {}
    for entry in activations.layers:
        for family in sparsity.families:
            if always_used(sparsity, entry.layer, family):
                found[entry.layer, family] = np.full(num_units(family, spec), activations.num_tokens, np.int64)
            else:
                found[entry.layer, family] = activity(activations, entry.layer, family, "counts").astype(np.int64)
    return found


def head_counts(spec: ModelSpec, activations: Activations, sparsity: Sparsity, num_tokens: int) -> Counts:
    """Returns counts over the first `num_tokens` tokens."""
    found: Counts = {}
    for entry in activations.layers:
        for family in sparsity.families:
            if always_used(sparsity, entry.layer, family):
                found[entry.layer, family] = np.full(num_units(family, spec), num_tokens, np.int64)
                continue
            bits = activity(activations, entry.layer, family, "bits")[:, : -(-num_tokens // 8)].copy()
            if num_tokens % 8:
                bits[:, -1] &= (1 << num_tokens % 8) - 1
            found[entry.layer, family] = population(bits)
    return found
