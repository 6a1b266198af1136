"""Storage formats of weights, one per file: how many bytes a slice takes, and the codes to and from float32.

`nbytes(length)`; `encode(values)`, rounding to nearest, and `decode(codes, length)`, for slices of weights;
`finite(codes)`, whether they decode to finite values, without decoding. For an algorithm that chooses codes by itself
(compiler/stages/quantize): `scales(group)`, the scale that a group of at most 32 values would get; `nearest(values,
scales)`, what codes can say under given scales; `pack(values, scales)`, their codes.
`MAX_LOGIT_ERROR` and `MAX_WEIGHT_ERROR`, what trained models lose at most.
"""
