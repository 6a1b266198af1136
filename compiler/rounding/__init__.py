"""Chooses the codes of matrices: the algorithms of `quantize`, and the values that a build's matrices have.

An algorithm is a file of this package whose class `Plugin` extends `Algorithm` (_weights.py). `quantize` stores codes;
`explore` runs the model with their values (compiler/activity/rounded.py).
"""
