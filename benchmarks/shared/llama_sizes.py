"""The types that llama.cpp gives a model's matrices at a size: its rule by tensor, for dense models of Llama's form.

v_proj and down_proj get more bits in some layers. A row that a block of 256 does not divide takes a type with blocks of
32. Models of 70B, Falcon and mixtures have other rules, which are not here. In place of Q3_K older versions of
llama.cpp have IQ4_NL and newer ones Q4_0; both take the same bytes, and here stands the better one.
"""

from coldpress.compiler.llama_cpp.types import BLOCKS
from coldpress.schemas.model import MatrixRole

USUAL = {"Q3_K_M": "Q3_K", "Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "Q8_0": "Q8_0"}
"""Size -> the type of matrices without a rule of their own."""
SIZES = tuple(USUAL)
OF_OTHER_ROWS = {"Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def type_of(size: str, matrix: MatrixRole, layer: int, num_layers: int, columns: int) -> str:
    """Returns the type of a layer's matrix with rows of `columns` values."""
    found = _by_matrix(size, matrix, layer, num_layers)
    return found if columns % BLOCKS[found][0] == 0 else OF_OTHER_ROWS[found]


def _by_matrix(size: str, matrix: MatrixRole, layer: int, num_layers: int) -> str:
    if size == "Q3_K_M":
        first = {"v_proj": 2, "down_proj": num_layers // 16}
        if layer < first.get(matrix, 0):
            return "Q5_K"
        return "Q4_K" if matrix in ("v_proj", "o_proj", "down_proj") else "Q3_K"
    if size in ("Q4_K_M", "Q5_K_M") and matrix in ("v_proj", "down_proj") and _has_more_bits(layer, num_layers):
        return "Q6_K"
    return USUAL[size]


def _has_more_bits(layer: int, num_layers: int) -> bool:
    """Tells whether a layer is among the first eighth, the last one, or each third between them."""
    first = num_layers // 8
    return layer < first or layer >= 7 * num_layers // 8 or (layer - first) % 3 == 2
