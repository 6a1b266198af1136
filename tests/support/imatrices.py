"""Writes importance matrices as llama.cpp does: the older form by hand, GGUF with the `gguf` package."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
"""Hugging Face's name -> llama.cpp's name of a Llama's matrix, without `blk.<layer>.` and `.weight`."""


def write_legacy(path: Path, means: Mapping[str, np.ndarray], calls: int = 3) -> Path:
    """Writes mean squares, float32 [inputs] or [experts, inputs] by llama.cpp's names, in the older form."""
    parts = [struct.pack("<i", len(means))]
    for name, values in means.items():
        text = name.encode()
        parts += [struct.pack("<i", len(text)), text, struct.pack("<ii", calls, values.size)]
        parts.append((np.asarray(values, "<f4") * calls).tobytes())
    parts += [struct.pack("<i", calls), struct.pack("<i", 4), b"text"]
    path.write_bytes(b"".join(parts))
    return path


def write_gguf(path: Path, means: Mapping[str, np.ndarray], counts: Mapping[str, list[float]] | None = None) -> Path:
    """Writes the same as GGUF; `counts` gives the number of tokens of each expert where it is not 512."""
    import gguf

    writer = gguf.GGUFWriter(path, arch="")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 4)
    writer.add_uint32("imatrix.chunk_size", 128)
    for name, values in means.items():
        each = np.atleast_2d(values).astype(np.float32)
        tokens = np.array((counts or {}).get(name, [512.0] * len(each)), np.float32)[:, None]
        writer.add_tensor(f"{name}.in_sum2", each * tokens)
        writer.add_tensor(f"{name}.counts", tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama(path: Path, layers: int, hidden_size: int, intermediate_size: int) -> Path:
    """Writes, in the older form, the matrix of a Llama whose queries are as wide as its hidden states.

    Later inputs count more than earlier ones.
    """
    sizes = dict.fromkeys(NAMES, hidden_size) | {"down_proj": intermediate_size}
    means = {
        f"blk.{layer}.{NAMES[role]}.weight": np.geomspace(0.01, 10, size)
        for layer in range(layers)
        for role, size in sizes.items()
    }
    return write_legacy(path, means)
