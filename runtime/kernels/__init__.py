"""The operations of a decoder on weights in their storage format, one per file.

All of them are in the native core, which refuses a format that it has no kernel for; tests compare each with the same
in numpy (tests/support/reference_kernels.py). Sums are float32 everywhere.
"""

FEW_TOKENS = 32
"""A pass of at most this many tokens computes each token separately, with the same bits as alone. For more tokens it is
faster to decode the weights and multiply matrices."""
