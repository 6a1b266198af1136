"""What it costs and gains to round what decoding multiplies weights with: perplexity and speed by activation format.

`python -m benchmarks.activations [--models prose7m …] [--formats int4_group32 …] [--tokens N]`. Each model's
weights are rounded to nearest, packed with the dense selector and run with all of it in DRAM: test tokens are scored
one by one, as decoding computes them, with float32, 16 and 8 bits, on one thread, in turns over blocks. The last line
is {rows: [{model, format, activations, tokens, ppl, over_fp32, over_fp32_error, ms_per_token}]}: `over_fp32` is the
perplexity over that of float32, its error the standard error over blocks of its logarithm.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.shared.report import finish, show
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
                "ms_per_token": 1000 * float(np.median(seconds[kind])),
            }
        )
    return rows


def everything(path: Path) -> int:
    """DRAM in which no unit is read twice."""
    manifest = open_artifact(path).manifest
    return fixed_bytes(manifest, choose_plan(manifest)) + manifest.flash.size_bytes


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["prose7m"], choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--formats", nargs="+", default=["int4_group32", "int8_group32"], metavar="FORMAT")
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    _native.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        loaded = load_hf(folder_of_data() / "models" / model)
        spec = spec_of(loaded.config)
        blocks = token_blocks(model, arguments.tokens)
        for name in arguments.formats:
            with tempfile.TemporaryDirectory(dir=".") as folder:
                recipe = Recipe(spec=spec, method="dense", format=name, context_length=CONTEXT_LENGTH)
                path = build_artifact(Path(folder) / "a.coldpress", recipe, roles_of(loaded, spec)).path
                rows += [{"model": model, "format": name, **row} for row in measure(path, blocks)]
    show("activations", list(rows[0]), (list(row.values()) for row in rows))
    finish({"rows": rows})


if __name__ == "__main__":
    main()
