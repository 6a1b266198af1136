"""Calls llama.cpp's own code: its rounding of a matrix, and its product of a matrix in its formats and a vector. Both
are of its ggml, as the extra `llama` brings it."""

import ctypes
import functools
import importlib
from pathlib import Path

import numpy as np

from coldpress.compiler.llama_cpp.types import BLOCKS, NAMES

F32 = 0
"""Number of a ggml_type."""
ROOM_BYTES = 256 << 20
"""Bytes beside the matrix: ggml takes memory for every product and frees none before the end."""


class _Params(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def quantize(values: np.ndarray, kind: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Returns codes of a type, uint8 [rows, row_bytes], of values float32 [rows, columns], as llama.cpp's `quantize`
    makes them with an importance matrix: `importance` float32 [columns]. Others may run beside it."""
    handle, count, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    chunk = _function("ggml_quantize_chunk", size, ctypes.c_int, handle, handle, count, count, count, handle)
    rows, columns = values.shape
    given = np.ascontiguousarray(values, np.float32)
    prices = None if importance is None else np.ascontiguousarray(importance, np.float32)
    num_values, nbytes = BLOCKS[kind]
    codes = np.empty((rows, columns // num_values * nbytes), np.uint8)
    number = next(number for number, name in NAMES.items() if name == kind)
    where = None if prices is None else prices.ctypes.data
    written = chunk(number, given.ctypes.data, codes.ctypes.data, 0, rows, columns, where)
    if written != codes.nbytes:
        raise RuntimeError(f"ggml wrote {written} bytes of {kind}, expected {codes.nbytes}")
    return codes


@functools.cache
def _library() -> ctypes.CDLL:
    xllamacpp = importlib.import_module("xllamacpp")
    return ctypes.CDLL(str(next(Path(str(xllamacpp.__file__)).parent.glob("*.so"))))


def _function(name: str, result: object, *arguments: object):
    function = getattr(_library(), name)
    function.restype, function.argtypes = result, arguments
    return function


class GgmlProduct:
    """A matrix in a format of llama.cpp's."""

    def __init__(self, codes: np.ndarray, length: int, ggml_type: int) -> None:
        """Copies `codes` uint8 [rows, row_bytes], rows of `length` values."""
        handle, count = ctypes.c_void_p, ctypes.c_int64
        init = _function("ggml_init", handle, _Params)
        new_tensor = _function("ggml_new_tensor_2d", handle, handle, ctypes.c_int, count, count)
        self._data = _function("ggml_get_data", handle, handle)
        self._compute = _function("ggml_graph_compute_with_ctx", ctypes.c_int, handle, handle, ctypes.c_int)
        _function("ggml_cpu_init", None)()
        self._context = init(_Params(codes.size + ROOM_BYTES, None, False))
        matrix = new_tensor(self._context, ggml_type, length, len(codes))
        vector = new_tensor(self._context, F32, length, 1)
        product = _function("ggml_mul_mat", handle, handle, handle, handle)(self._context, matrix, vector)
        self._graph = _function("ggml_new_graph", handle, handle)(self._context)
        _function("ggml_build_forward_expand", None, handle, handle)(self._graph, product)
        self._array(matrix, codes.size, ctypes.c_uint8)[:] = codes.ravel()
        self._x = self._array(vector, length, ctypes.c_float)
        self._out = self._array(product, len(codes), ctypes.c_float)

    def __call__(self, x: np.ndarray, num_threads: int) -> np.ndarray:
        """Returns the product with `x` float32 [length], float32 [rows], valid until the next call."""
        self._x[:] = x
        status = self._compute(self._context, self._graph, num_threads)
        if status:
            raise RuntimeError(f"ggml ended with status {status}")
        return self._out

    def _array(self, tensor: int, count: int, kind: type[ctypes.c_uint8 | ctypes.c_float]) -> np.ndarray:
        return np.ctypeslib.as_array((kind * count).from_address(self._data(tensor)))
