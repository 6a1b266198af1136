"""The operations of a decoder on weights in their storage format, one per file.

Each file has the plain numpy `reference…` and the function that calls the native core; tests hold them equal. Sums are
float32 everywhere.
"""
