"""The artifact against `transformers`, on every small real model: same tokens, same logits, same perplexity.

`python -m benchmarks.parity [--models demo prose7m …]`. Each model is compiled with the dense selector, so that
nothing but formats and our arithmetic can differ. fp16: 64 greedy tokens read from flash, and the largest difference of
logits on the test text over the largest logit (at most 2e-3). int8_group32 and int4_group32: perplexity against the
source's, and against the same codes run densely in `transformers` (equal to 0.1 %). The last line is
{model: {tokens_equal, max_logit_error, ppl_source, int8_over_source, int4_over_source, int8_over_codes,
int4_over_codes}}.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.end_to_end import MODELS, settings
from benchmarks.shared.report import finish, show
from coldpress.compiler.io import load_arrays, load_record
from coldpress.runtime.generate.session import Session
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.metrics import Verification
from coldpress.schemas.model import Model
from tests.support.dense_codes import perplexity, with_codes
from tests.support.pipeline import build

NEW_TOKENS = 64
PROMPT_TOKENS = 16
TEST_TOKENS, BLOCK_TOKENS = 1024, 128


def compile_as(model: str, device: str, folder: Path, format_name: str) -> Path:
    """Builds with the dense selector; returns the device's build folder."""
    return build(folder, **settings(model, device) | {"method": "dense", "format": format_name})


def greedy(source: object, prompt: np.ndarray) -> list[int]:
    """`transformers`' greedy continuation; end-of-sequence tokens do not stop it."""
    import torch

    tokens = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            following = source(tokens).logits[:, -1].argmax(-1, keepdim=True)  # type: ignore[operator]
            tokens = torch.cat([tokens, following], dim=1)
    return tokens[0, len(prompt) :].tolist()


def measure(model: str, device: str, folder: Path) -> dict[str, float | bool]:
    """All figures of one model."""
    import torch
    from transformers import AutoModelForCausalLM

    top = compile_as(model, device, folder, "fp16")
    record = load_record(top.parent / "ingest.json", Model)
    blocks = load_arrays(load_record(top.parent / "tokenize.json", Corpus).split("test").arrays)["tokens"]
    blocks = blocks[: TEST_TOKENS // BLOCK_TOKENS, :BLOCK_TOKENS]
    weights = next(iter(record.tensors.values())).file.rpartition("/")[0]
    source = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    prompt = blocks[0][:PROMPT_TOKENS]
    (artifact,) = top.glob("*.coldpress")
    ours = Session(artifact).generate(prompt.tolist(), NEW_TOKENS, ignore_eos=True).token_ids
    ppl_source = perplexity(source, blocks)
    figures: dict[str, float | bool] = {
        "tokens_equal": list(ours) == greedy(source, prompt),
        "max_logit_error": load_record(top / "verify.json", Verification).max_logit_error,
        "ppl_source": ppl_source,
    }
    for format_name in ("int8_group32", "int4_group32"):
        (artifact,) = compile_as(model, device, folder, format_name).glob("*.coldpress")
        session = Session(artifact)
        found = session.perplexity(blocks, sparse=True).perplexity
        short = format_name.partition("_")[0]
        figures[f"{short}_over_source"] = found / ppl_source
        figures[f"{short}_over_codes"] = found / perplexity(with_codes(session, record), blocks)
    return figures


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="pixel6")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    arguments = parser.parse_args()
    figures = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            figures[model] = measure(model, arguments.device, Path(folder))
        print(model, json.dumps(figures[model]), flush=True)
    columns = list(next(iter(figures.values())))
    show("artifact against transformers", ["model", *columns], ([name, *row.values()] for name, row in figures.items()))
    finish(figures)


if __name__ == "__main__":
    main()
