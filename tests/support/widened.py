"""Widens a small real checkpoint without changing what it computes, so that its units have the bytes of a 7B's.

A unit of a small model takes a few hundred bytes, and a device reads 4 KB in the same time: so what a selector saves
there says nothing about large models. A widened checkpoint repeats the vector of hidden states `times` times, whole
vector after whole vector. Its mean square stays the same, so that norms change nothing. Matrices that read the vector
are repeated and divided by `times`; matrices that write it are repeated. If `times` is a power of two, no value is
rounded. If the source's hidden size is a multiple of 32, each group of 32 values has the same codes as in the source.

`python -m tests.support.widened MODEL --times 16 --output FOLDER` writes one.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def _embedded(array: np.ndarray, times: int) -> np.ndarray:
    return np.tile(array, (1, times))


def _read(array: np.ndarray, times: int) -> np.ndarray:
    return _embedded(array, times) / np.float32(times)


def _written(array: np.ndarray, times: int) -> np.ndarray:
    return np.tile(array, (times, 1))


WIDENED: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), _read),
    **dict.fromkeys(("o_proj", "down_proj"), _written),
    "embed_tokens": _embedded,
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), np.tile),
}
"""Module -> its wider weight. Only Llama's modules without biases."""


def widen(source: Path, target: Path, times: int) -> Path:
    """Writes the checkpoint in the folder `target`; returns it.

    Args:
        source: A Llama checkpoint of one shard.
        target: A folder, made here.
        times: How many times as wide hidden states are; a power of two.
    """
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    assert config["model_type"] == "llama"
    assert times & (times - 1) == 0
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name not in (WEIGHTS, CONFIG):
            shutil.copyfile(path, target / path.name)
    is_tied = config.get("tie_word_embeddings", False)

    def wider(name: str, array: np.ndarray) -> np.ndarray:
        if name == "model.norm.weight":  # the tied head is the embedding, which is repeated and not divided
            return np.tile(array, times) / np.float32(times if is_tied else 1)
        return WIDENED[name.split(".")[-2]](array, times)

    arrays = load_file(source / WEIGHTS)
    wide = {name: np.ascontiguousarray(wider(name, array), array.dtype) for name, array in arrays.items()}
    save_file(wide, target / WEIGHTS, metadata={"format": "pt"})
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["hidden_size"] *= times
    (target / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    return target


def main() -> None:
    """Writes the checkpoint that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a Llama checkpoint")
    parser.add_argument("--times", type=int, default=16, help="how many times as wide hidden states are (default: 16)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    widen(arguments.model, arguments.output, arguments.times)


if __name__ == "__main__":
    main()
