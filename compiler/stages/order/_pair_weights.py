"""Computes pair weights other than plain co-activation, as integers, so that Algorithm 1 can use counting sort."""

import math

import numpy as np

from coldpress.compiler.compiled import compiled

HIGHEST = 65535


def jaccard(counts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Returns tokens with both units over tokens with either, times HIGHEST; uint16 [n, n], defined for i < j."""
    weights = np.zeros(counts.shape, np.uint16)
    _jaccard(counts, totals, weights)
    return weights


def lift(counts: np.ndarray, totals: np.ndarray, num_tokens: int) -> np.ndarray:
    """Returns how much more often than by chance two units meet, P(ij) / (P(i) P(j)), scaled to uint16 [n, n]. A
    logarithm (linear between powers of two, hence the same on any machine) keeps order and fits the range: from 1 for a
    lift of 1 / num_tokens to HIGHEST for num_tokens; 0 for pairs that never meet."""
    weights = np.zeros(counts.shape, np.uint16)
    _lift(counts, totals, num_tokens, weights)
    return weights


@compiled
def _jaccard(counts, totals, weights):
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            both = np.int64(counts[i, j])
            weights[i, j] = HIGHEST * both // max(1, totals[i] + totals[j] - both)


@compiled
def _lift(counts, totals, num_tokens, weights):
    highest = _logarithm(num_tokens + 1.0)
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            if counts[i, j]:
                above = _logarithm(counts[i, j] * num_tokens / (totals[i] * totals[j])) + highest
                weights[i, j] = 1 + int((HIGHEST - 1) * above / (2 * highest))


@compiled
def _logarithm(value):
    mantissa, exponent = math.frexp(value)
    return exponent + 2 * mantissa - 2
