"""Runs llama.cpp on a planted artifact's weights, mapped into memory: the baseline under an emulated device's caps.

The export is the product's own (compiler/stages/export/gguf.py) in Q4_0, with the activation of llama.cpp's
architecture: it computes the same products of the same matrices and reads the same bytes, but combines their sums
otherwise. Its weights are pages of the file, which the kernel keeps as long as there is memory. The cap on memory is
the budget plus this process's memory without files, which is measured before; so weights get the budget of our runtime.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.shared.llama import LlamaCpp
from coldpress.runtime.artifact.reader import open_artifact

CONTEXT_LENGTH = 64
SLACK_BYTES = 16 << 20
"""Memory of a process for its code, and what the kernel keeps for it."""
UNCAPPED_BYTES = 4 << 30
"""Enough memory, beside the budget, to measure what llama.cpp keeps beside its weights."""


def export(artifact: Path, file: Path) -> None:
    """Writes the GGUF file unless it exists."""
    if file.exists():
        return
    from coldpress.compiler.stages.export import gguf
    from coldpress.compiler.stages.export._stored import StoredModel
    from coldpress.compiler.stages.export.gguf import Options

    opened = open_artifact(artifact)
    spec = opened.manifest.model.model_copy(update={"hidden_act": "silu"})
    as_llama = replace(opened, manifest=opened.manifest.model_copy(update={"model": spec}))
    temporary = file.with_suffix(".part")
    gguf.Plugin().write(StoredModel(as_llama), Options(gguf_type="Q4_0"), temporary)
    temporary.rename(file)


def measure(file: Path, passages: np.ndarray, num_tokens: int) -> dict[str, float]:
    """Decodes some tokens after the beginning of each passage; returns median speed and memory outside files."""
    engine = _mapped(file)
    speeds = [engine.generate(passage[:2].tolist(), num_tokens, ignore_eos=True)[1] for passage in passages]
    return {"tokens_per_s": float(np.median(speeds[1:])), "own_bytes": own_bytes()}


def follow(file: Path, passages: np.ndarray) -> dict[str, float]:
    """Computes given texts token by token, int [num_texts, T]; returns the mean over tokens of all texts but the
    first, and memory outside files."""
    engine = _mapped(file)
    seconds = [engine.follow(passage.tolist()) for passage in passages]
    return {"token_s": float(np.mean(seconds[1:])), "own_bytes": own_bytes()}


def _mapped(file: Path) -> LlamaCpp:
    return LlamaCpp(str(file), CONTEXT_LENGTH, os.cpu_count() or 1, mapped_alone=True)


def limit_bytes(budget_bytes: int, measured: Mapping[str, float]) -> int:
    """Returns the cap on memory under which weights get a budget; `measured` is from a run without it."""
    return int(budget_bytes + measured["own_bytes"]) + SLACK_BYTES


def own_bytes() -> int:
    """Returns the bytes of this process that the kernel cannot drop: all but pages of files, of weights or code."""
    (line,) = re.findall("^Anonymous: +([0-9]+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(line) << 10
