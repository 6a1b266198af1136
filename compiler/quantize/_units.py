"""Weights into codes, a block of slices at a time.

Rows are read as they are needed. Columns need their whole matrix, so memory is at most one matrix in float32 and the
codes of a layer. A slice is encoded on its own, so the size of a block changes no byte.
"""

import logging
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np

from compiler.checkpoint.tensors import read_role, read_rows, rotary_inv_freq
from runtime._plugins import load
from schemas.errors import CheckpointError, ColdpressError
from schemas.families import FormatName, Slice, num_units, slice_length, slices
from schemas.model import MLP_ROLES, Model, ModelSpec
from schemas.quantized import ResidentTensor

LOG = logging.getLogger(__name__)
BLOCK_BYTES = 8 << 20
"""float32 bytes that are read, transposed and encoded at a time."""
BAND_ROWS = 16
"""Rows that are transposed at a time: a band writes whole cache lines and stays in the cache; 7 times faster."""
SAMPLED_SLICES = 16
"""Slices of a block, at most, whose error is looked at."""


def encode_units(algorithm: ModuleType, model: Model, layer: int, family: str, format_name: FormatName) -> np.ndarray:
    """One family of one layer: uint8 [num_units, unit_bytes], unit i at row i, its slices in the family's order.

    Raises:
        CheckpointError: if a value is beyond what the format can hold.
    """
    nbytes = load("runtime.quantization", format_name).nbytes
    pieces = slices(family, model.spec)
    lengths = [slice_length(piece, model.spec) for piece in pieces]
    units = np.empty((num_units(family, model.spec), sum(map(nbytes, lengths))), np.uint8)
    stop = 0
    for piece, length in zip(pieces, lengths, strict=True):
        start, stop = stop, stop + nbytes(length)
        for rows, role in _tensors(model.spec, layer, piece, len(units)):
            blocks = {"row": _rows, "column": _columns, "matrix": _whole}[piece.axis](model, role)
            _encode(algorithm, blocks, length, role, format_name, units[rows, start:stop])
    return units


def _tensors(spec: ModelSpec, layer: int, piece: Slice, num_units: int) -> Iterator[tuple[slice, str]]:
    """(units, role) of every tensor that holds slices: one, or one for each expert, whose units follow each other."""
    if spec.num_experts == 1 or piece.role not in MLP_ROLES:
        yield slice(0, num_units), f"layers.{layer}.{piece.role}.weight"
        return
    each = num_units // spec.num_experts
    for expert in range(spec.num_experts):
        yield slice(expert * each, (expert + 1) * each), f"layers.{layer}.experts.{expert}.{piece.role}.weight"


def encode_resident(algorithm: ModuleType, model: Model, tensor: ResidentTensor) -> np.ndarray:
    """A tensor that stays in DRAM: float32 as it is, or a matrix's rows as codes uint8 [rows, row_bytes].

    Raises:
        CheckpointError: if a value is beyond what the format can hold.
    """
    if tensor.role == "rotary.inv_freq":  # computed from the configuration, not stored in checkpoints
        return np.asarray(rotary_inv_freq(model), np.float32)
    if tensor.format is None:
        return read_role(model, tensor.role)
    length = tensor.shape[1]
    codes = np.empty((tensor.shape[0], load("runtime.quantization", tensor.format).nbytes(length)), np.uint8)
    _encode(algorithm, _rows(model, tensor.role), length, tensor.role, tensor.format, codes)
    return codes


Blocks = Callable[[int, int], np.ndarray]
"""(start, stop) -> the slices from start to stop, float32 [stop - start, length]."""


def _rows(model: Model, role: str) -> Blocks:
    return lambda start, stop: read_rows(model, role, start, stop)


def _whole(model: Model, role: str) -> Blocks:
    return lambda start, stop: read_role(model, role).reshape(1, -1)[start:stop]


def _columns(model: Model, role: str) -> Blocks:
    rows, columns = model.tensors[role].shape
    weight = np.empty((rows, columns), np.float32)
    step = _per_block(columns)
    for start in range(0, rows, step):
        weight[start : start + step] = read_rows(model, role, start, min(start + step, rows))

    def block(start: int, stop: int) -> np.ndarray:
        turned = np.empty((stop - start, rows), np.float32)
        for row in range(0, rows, BAND_ROWS):
            turned[:, row : row + BAND_ROWS] = weight[row : row + BAND_ROWS, start:stop].T
        return turned

    return block


def _encode(
    algorithm: ModuleType, blocks: Blocks, length: int, role: str, format_name: FormatName, codes: np.ndarray
) -> None:
    """Fills `codes` uint8 [n, nbytes(length)] with n slices of `length` values."""
    step, kept = _per_block(length), load("runtime.quantization", format_name)
    squares = np.zeros(2)
    for start in range(0, len(codes), step):
        stop = min(start + step, len(codes))
        values = np.ascontiguousarray(blocks(start, stop))
        try:
            codes[start:stop] = algorithm.quantize(values, format_name)
        except ColdpressError as error:
            raise CheckpointError(f"{role}: {error}") from error
        sample = slice(None, None, -(-(stop - start) // SAMPLED_SLICES))
        lost = kept.decode(codes[start:stop][sample], length) - values[sample]
        squares += [np.square(part, dtype=np.float64).sum() for part in (lost, values[sample])]
    error, norm = np.sqrt(squares)
    if error > kept.MAX_WEIGHT_ERROR * norm:
        LOG.warning(
            "quantize: warning: %s loses %.2g of its norm in %s, at most %g is usual; its values are too small, "
            "or a few of them too large, for the format",
            *(role, error / norm, format_name, kept.MAX_WEIGHT_ERROR),
        )


def _per_block(length: int) -> int:
    return max(1, BLOCK_BYTES // (4 * length))
