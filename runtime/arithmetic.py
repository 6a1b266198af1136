"""The small dense arithmetic of a decoder that needs no kernel: norms, activations, rotary positions, largest
values. Plain numpy.

Everything is float32 in and out and follows transformers' modules, which are the reference (LlamaRMSNorm, nn.LayerNorm,
ACT2FN, apply_rotary_pos_emb). Shape letters: T tokens, H heads, D head_dim, R rotary_dim.
"""

from collections.abc import Callable

import numpy as np

from coldpress.schemas.model import Activation

# A rational approximation of erf on [-4, 4] in odd powers of x over even ones; its error is below 5e-7 (tested).
ERF_NUMERATOR = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
ERF_DENOMINATOR = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


SWIGLU_ALPHA = 1.702
"""The factor of the sigmoid's input in `swiglu_oai`."""


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Divides `x` [..., n] by the root of its mean square and multiplies by `weight` [n]."""
    mean_square = np.add.reduce(x * x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """Normalizes `x` [..., n] by mean and standard deviation, multiplies by `weight` [n] and adds any `bias` [n]."""
    centred = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    normed = rms_norm(centred, weight, eps)
    return normed if bias is None else normed + bias


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return x / (1 + np.exp(-x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
        return 1 / (1 + np.exp(-x))


def erf(x: np.ndarray) -> np.ndarray:
    x = np.clip(x, -4, 4)
    square = x * x
    return x * _polynomial(ERF_NUMERATOR, square) / _polynomial(ERF_DENOMINATOR, square)


def _polynomial(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    """Evaluates a polynomial by Horner's scheme; the coefficient of the highest power comes first."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + np.float32(coefficient)
    return total


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def _clamped_swish(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(np.float32(SWIGLU_ALPHA) * x)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, np.float32(0))


def activation(name: Activation, threshold: float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the gate's activation function, float32 [...]; only `fatrelu` and `swiglu_oai` use `threshold`."""
    functions: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
        "relu": _relu,
        "relu2": lambda x: np.square(_relu(x)),
        "drelu": _relu,
        "fatrelu": lambda x: np.where(x >= np.float32(threshold), x, np.float32(0)),
        "silu": _silu,
        "gelu": lambda x: np.float32(0.5) * x * (1 + erf(x * np.float32(0.5**0.5))),
        "gelu_tanh": _gelu_tanh,
        "swiglu_oai": lambda x: _clamped_swish(np.minimum(x, np.float32(threshold))),
    }
    return functions[name]


def up_activation(name: Activation, threshold: float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function that an MLP with the activation `name` applies to the up projection: identity, ReLU (drelu),
    or clamp and + 1 (swiglu_oai); float32 [...] -> float32 [...]."""
    if name == "drelu":
        return _relu
    if name == "swiglu_oai":
        limit = np.float32(threshold)
        return lambda x: np.clip(x, -limit, limit) + np.float32(1)
    return lambda x: x


def rotary_tables(positions: np.ndarray, inv_freq: np.ndarray, scaling: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns cos and sin, float32 [T, 1, R / 2] each, for `positions` [T] and `inv_freq` float32 [R / 2]."""
    angles = positions.astype(np.float32)[:, None, None] * inv_freq
    return np.cos(angles) * np.float32(scaling), np.sin(angles) * np.float32(scaling)


def rotate(x_THD: np.ndarray, cos: np.ndarray, sin: np.ndarray, neighbours: bool = False) -> np.ndarray:
    """Rotates the leading R dimensions of each head by its position; dimensions i and i + R / 2 form a pair.

    With `neighbours`, dimensions 2 i and 2 i + 1 form a pair instead. The result then holds the first dimension of each
    pair, followed by the second of each pair. Queries and keys are reordered in the same way, so their products stay
    the same.
    """
    half = cos.shape[-1]
    rotated, rest = x_THD[..., : 2 * half], x_THD[..., 2 * half :]
    if neighbours:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Marks the k largest of each row: float32 [T, num_units] -> bool [T, num_units]; ties go to the lower id."""
    num_units = values.shape[1]
    if k >= num_units:
        return np.ones(values.shape, bool)
    smallest = _kth_largest(values, k)
    chosen = values > smallest
    lacking = k - chosen.sum(axis=1)  # a decoded token runs this: array methods call less Python than numpy's functions
    tied = values == smallest
    # A running count is only needed in rows where more units tie for the last places than there are places.
    several = (tied.sum(axis=1) > lacking).nonzero()[0]
    if several.size:
        tied[several] &= tied[several].cumsum(axis=1) <= lacking[several, None]
    return chosen | tied


def _kth_largest(values: np.ndarray, k: int) -> np.ndarray:
    """Returns the k-th largest value of each row, float32 [T, 1]: behind a ReLU it is 0 in most rows, which numpy's
    partition takes twenty times as long to find as a sort does."""
    place = values.shape[1] - k
    if values.min() != 0:
        return np.partition(values, place, axis=1)[:, place, None]
    sought = np.count_nonzero(values, axis=1) >= k  # in other rows it is 0, as no value is negative
    found = np.zeros((len(values), 1), values.dtype)
    if sought.any():
        found[sought] = np.partition(values[sought], place, axis=1)[:, place, None]
    return found
