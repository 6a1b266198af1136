"""Writes what llama-bench writes, with the fields of a recent version."""

import json
from pathlib import Path
from typing import Any

GENERATING: dict[str, Any] = {
    "build_commit": "0123abc",
    "build_number": 11549,
    "cpu_info": "Cortex-X1",
    "gpu_info": "",
    "backends": "CPU",
    "model_filename": "model.gguf",
    "model_type": "llama 7B Q4_0",
    "model_size": 3_825_065_984,
    "model_n_params": 6_738_415_616,
    "n_threads": 4,
    "use_mmap": True,
    "n_prompt": 0,
    "n_gen": 128,
    "avg_ns": 25_000_000_000,
    "avg_ts": 5.123456,
    "stddev_ts": 0.04,
    "samples_ts": [5.08, 5.16],
}


def write_llama_bench(path: Path, *changes: dict[str, Any]) -> Path:
    """Writes a test for each of `changes`; returns the path."""
    path.write_text(json.dumps([GENERATING | change for change in changes]), encoding="utf-8")
    return path
