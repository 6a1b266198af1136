"""Reads activation counts from the packed bits: for all tokens, and for the first ones. A family that is always used
(density 1) needs no bits: every token counts all its units."""

import numpy as np

from coldpress.compiler.activity.held_out import activity, always_used
from coldpress.compiler.activity.packed_bits import population
from coldpress.schemas.activations import Activations
from coldpress.schemas.families import FamilyName, num_units, unit_keys
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
    for layer, family in unit_keys(sparsity.families, spec):
        if always_used(sparsity, layer, family):
            found[layer, family] = np.full(num_units(family, spec), activations.num_tokens, np.int64)
        else:
            found[layer, family] = activity(activations, layer, family, "counts").astype(np.int64)
    return found


def head_counts(spec: ModelSpec, activations: Activations, sparsity: Sparsity, num_tokens: int) -> Counts:
    found: Counts = {}
    for layer, family in unit_keys(sparsity.families, spec):
        if always_used(sparsity, layer, family):
            found[layer, family] = np.full(num_units(family, spec), num_tokens, np.int64)
            continue
        bits = activity(activations, layer, family, "bits")[:, : -(-num_tokens // 8)].copy()
        if num_tokens % 8:
            bits[:, -1] &= (1 << num_tokens % 8) - 1
        found[layer, family] = population(bits)
    return found
