"""What rounding the inputs of products costs and gains: perplexity and speed by activation format.

Each model's weights are rounded to nearest, packed with the dense selector and run with all of it in DRAM. Test tokens
are scored one by one, as decoding computes them, with float32, 16 and 8 bits, on one thread, in turns over blocks.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.harness.benchmark import Benchmark, Cell, Row, option
from benchmarks.harness.command import main
from benchmarks.harness.timing import gain, spread
from coldpress.compiler.block_statistics import standard_error
from coldpress.runtime import _native
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels.activations import ACTIVATIONS
from coldpress.runtime.plan.budget import choose_plan, fixed_bytes
from tests.support.artifacts import Recipe, build_artifact
from tests.support.data import find_data_folder
from tests.support.hf import load_hf, roles_of, spec_of

CONTEXT_LENGTH = 256
WIKITEXT, STORIES = "corpora/wikitext-2/test.txt", "corpora/tinystories/eval.jsonl"
MODELS = {"prose7m": WIKITEXT, "stories260k": STORIES, "tinystories656k": STORIES}
"""Model -> the text that it is scored on."""


def folder_of_data() -> Path:
    """The real test data."""
    found = find_data_folder()
    if found is None:
        raise SystemExit("no real test data: set COLDPRESS_TEST_DATA to its folder")
    return found


def token_blocks(model: str, num_tokens: int) -> np.ndarray:
    """int [blocks, CONTEXT_LENGTH] of the test text that goes with a model."""
    data = folder_of_data()
    tokenizer = Tokenizer.from_file(str(data / "models" / model / "tokenizer.json"))
    if MODELS[model] == WIKITEXT:
        text = (data / WIKITEXT).read_text()[:200_000].replace("<unk>", "").replace(" @-@ ", "-")
    else:
        text = "\n".join(json.loads(line)["text"] for line in (data / MODELS[model]).read_text().splitlines())
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids[:num_tokens])
    return ids[: ids.size // CONTEXT_LENGTH * CONTEXT_LENGTH].reshape(-1, CONTEXT_LENGTH)


def measure(path: Path, blocks: np.ndarray) -> list[dict[str, Any]]:
    """A row for each activation format of an artifact."""
    nll: dict[str, list[float]] = {kind: [] for kind in ACTIVATIONS}
    seconds: dict[str, list[float]] = {kind: [] for kind in ACTIVATIONS}
    budget = everything(path)
    sessions = {kind: Session(path, dram_budget_bytes=budget, activations=kind) for kind in ACTIVATIONS}
    for block in blocks:
        for kind, session in sessions.items():
            found = session.perplexity(block[None], sparse=True)
            nll[kind] += found.block_nll
            seconds[kind].append(found.metrics.decode_s / found.metrics.num_tokens)
    rows = []
    for kind in ACTIVATIONS:
        more = np.array(nll[kind]) - np.array(nll["fp32"])
        rows.append(
            {
                "activations": kind,
                "tokens": blocks.size,
                "ppl": math.exp(np.mean(nll[kind])),
                "over_fp32": math.exp(more.mean()),
                "over_fp32_error": standard_error(more),
                "token_s": spread(seconds[kind]),
                "speedup": gain(seconds["fp32"], seconds[kind]),
            }
        )
    return rows


def everything(path: Path) -> int:
    """DRAM in which no unit is read twice."""
    manifest = open_artifact(path).manifest
    return fixed_bytes(manifest, choose_plan(manifest)) + manifest.flash.size_bytes


@dataclass(frozen=True)
class Options:
    """What is scored."""

    models: tuple[str, ...] = option(
        ("prose7m",), smoke=("stories260k",), full=tuple(MODELS), choices=MODELS, help="real models"
    )
    formats: tuple[str, ...] = option(("int4_group32", "int8_group32"), smoke=("int4_group32",), help="weight formats")
    tokens: int = option(4096, smoke=512, help="test tokens, at most; each block of 256 is a round of the timing")


class Plugin(Benchmark[Options]):
    """Scores each model in each format with each activation format."""

    keys = {
        "rows[].model": "real model",
        "rows[].format": "weight format",
        "rows[].activations": "activation format",
        "rows[].tokens": "tokens that were scored",
        "rows[].ppl": "perplexity",
        "rows[].over_fp32": "perplexity over that of float32",
        "rows[].over_fp32_error": "standard error of its logarithm over blocks",
        "rows[].token_s": "seconds of a token",
        "rows[].speedup": "float32's seconds over these, formed in each block",
    }
    is_timing = True
    needs_data = True
    over = {"model": "models", "format": "formats"}
    full_minutes = 10

    def measure(self, cell: Cell) -> Iterator[Row]:
        """A row per activation format."""
        _native.set_num_threads(1)
        loaded = load_hf(folder_of_data() / "models" / cell["model"])
        spec = spec_of(loaded.config)
        recipe = Recipe(spec=spec, method="dense", format=cell["format"], context_length=CONTEXT_LENGTH)
        path = build_artifact(self.folder / "-".join(cell.values()), recipe, roles_of(loaded, spec)).path
        yield from measure(path, token_blocks(cell["model"], self.options.tokens))


if __name__ == "__main__":
    main("activations")
