"""What decoding several sequences at once brings: tokens per second, what a token reads, and what is left of sparsity.

`python -m tests.benchmarks.batch [--cases relu-10 …] [--batches 1 2 …] [--layers 2] [--passes 6]`. Planted layers of a
7B's shape (tests/benchmarks/_planted.py), each sequence on a topic of its own, with half of the units in DRAM; and
prose7m-relu on WikiText, each sequence another passage, a third of its units in DRAM. Every batch is decoded with the
case's selector and, for comparison, densely under the same budget. Tokens are drawn, so that sequences differ. The
first passes, which fill caches, do not count.

The last line is {rows: [{case, batch, tokens_per_s, per_sequence, over_dense, union_density, reads_per_token,
bytes_per_token, …}]}: `union_density` is the share of its family's units that a pass asks for, in the mean;
`prefill_over_alone` and `prefill_bytes_over_alone`: seconds and bytes of prompts one after the other over all at once.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from runtime._sampling import Sampling
from runtime.batch import Batch, generate_batch
from runtime.generate import Session
from runtime.trace import FETCH, Recorder
from tests.benchmarks._planted import CASES, NUM_TOPICS, VOCAB_SIZE, order_of, planted_weights
from tests.benchmarks._report import finish, show
from tests.support.artifacts import Recipe, build_artifact
from tests.support.data import data_folder
from tests.support.hf import load_hf, roles_of, spec_of
from tests.support.methods import families_of
from tests.support.planted import plant_of
from tests.support.shapes import spec_7b

BATCHES = (1, 2, 4, 8, 16, 32)
REAL = "prose7m-relu"
PROMPT_TOKENS, CONTEXT_LENGTH = 4, 512
WARM_PASSES = 3


@dataclass(frozen=True)
class Decoded:
    """What passes took, behind the first ones."""

    seconds: float
    reads: float
    read_bytes: float
    wait_s: float
    hit_rate: float
    density: float
    """Share of its family's units that a fetch asked for, in the mean."""
    prefill_s: float
    """Of all prompts together."""
    prefill_bytes: int


def write_planted(case: str, layers: int, folder: Path) -> Path:
    """An artifact of planted layers, its units in the order of their numbers."""
    method, act, density = CASES[case]
    plant = plant_of("mistral-7b", layers, density, hidden_act=act, vocab_size=VOCAB_SIZE, num_topics=NUM_TOPICS)
    spec = spec_7b(layers, VOCAB_SIZE, act)
    keys = [(layer, family) for layer in range(layers) for family in families_of(method, spec)]
    recipe = Recipe(
        spec=spec,
        method=method,
        format="int4_group32",
        cache="lfu",
        pinned_share=0.2,
        slots_share=0.3,
        read_buffer_bytes=8 << 20,
        collapse_gap_bytes=16384,
        context_length=64,
        density=density,
        rank={key: order_of(plant, "by-frequency", *key) for key in keys},
    )
    return build_artifact(folder / case, recipe, planted_weights(plant)).path


def write_real(folder: Path) -> Path:
    """The artifact of the real model."""
    model = load_hf(data_folder() / "models" / REAL)
    recipe = Recipe(spec=spec_of(model.config), method="relu", density=0.3, format="int4_group32", cache="lfu")
    changes = {"pinned_share": 0.1, "slots_share": 0.23, "context_length": CONTEXT_LENGTH, "page_bytes": 512}
    return build_artifact(folder / REAL, Recipe(**{**vars(recipe), **changes}), roles_of(model, recipe.spec)).path


def prompts_of(case: str, batch: int) -> list[list[int]]:
    """A prompt for each sequence: words of a topic, or a passage."""
    if case == REAL:
        tokenizer = Tokenizer.from_file(str(data_folder() / "models" / REAL / "tokenizer.json"))
        text = (data_folder() / "corpora/wikitext-2/test.txt").read_text()[:400_000]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        step = len(ids) // max(BATCHES)
        return [ids[start : start + PROMPT_TOKENS] for start in range(0, batch * step, step)]
    random = np.random.default_rng(5)
    words = random.integers(1, VOCAB_SIZE // NUM_TOPICS, (max(BATCHES), PROMPT_TOKENS))
    return [(topic + NUM_TOPICS * words[topic]).tolist() for topic in range(batch)]


def decode(path: Path, prompts: Sequence[Sequence[int]], passes: int, selector: str | None) -> Decoded:
    """One batch, with the plan's selector or another."""
    recorder = Recorder()
    drawn = [Sampling(temperature=1.0, seed=seed) for seed in range(len(prompts))]
    with Session(path, selector=selector, recorder=recorder) as session:
        done = generate_batch(session, prompts, 1 + WARM_PASSES + passes, sampling=drawn, ignore_eos=True)
        counts = {section.family: section.num_units for section in session.artifact.manifest.flash.sections}
    late = [event for event in recorder.events if event.kind == FETCH and event.token > WARM_PASSES * len(prompts)]
    return _of_passes(done, float(np.mean([event.ids.size / counts[event.family] for event in late])))


def _of_passes(done: Batch, density: float) -> Decoded:
    leading = [token for token in done.decoded if token.leads][WARM_PASSES:]
    hits, misses = sum(token.hits for token in leading), sum(token.misses for token in leading)
    return Decoded(
        seconds=float(np.median([token.seconds for token in leading])),
        reads=float(np.mean([token.reads for token in leading])),
        read_bytes=float(np.mean([token.read_bytes for token in leading])),
        wait_s=float(np.median([token.flash_s for token in leading])),
        hit_rate=hits / (hits + misses),
        density=density,
        prefill_s=done.metrics.prefill_s,
        prefill_bytes=done.metrics.prefill_read_bytes,
    )


def measure(case: str, path: Path, batch: int, passes: int) -> dict[str, Any]:
    """A row."""
    prompts = prompts_of(case, batch)
    sparse, dense = (decode(path, prompts, passes, selector) for selector in (None, "dense"))
    with Session(path) as session:
        alone = [session.generate(prompt, 1).metrics for prompt in prompts]
    alone_s, alone_bytes = (sum(getattr(one, f"prefill_{name}") for one in alone) for name in ("s", "read_bytes"))
    return {
        "case": case,
        "batch": batch,
        "tokens_per_s": batch / sparse.seconds,
        "per_sequence": 1 / sparse.seconds,
        "dense_tokens_per_s": batch / dense.seconds,
        "over_dense": dense.seconds / sparse.seconds,
        "union_density": sparse.density,
        "reads_per_token": sparse.reads / batch,
        "bytes_per_token": sparse.read_bytes / batch,
        "dense_bytes_per_token": dense.read_bytes / batch,
        "prefill_s_per_prompt": sparse.prefill_s / batch,
        "prefill_over_alone": alone_s / sparse.prefill_s,
        "prefill_bytes_over_alone": alone_bytes / sparse.prefill_bytes,
        "wait_share": sparse.wait_s / sparse.seconds,
        "hit_rate": sparse.hit_rate,
    }


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, REAL], default=[*CASES, REAL], metavar="CASE")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, metavar="N")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where artifacts are kept for the next run")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        folder = arguments.folder or Path(temporary)
        for case in arguments.cases:
            path = folder / case
            if not path.exists():
                path = write_real(folder) if case == REAL else write_planted(case, arguments.layers, folder)
            rows += [measure(case, path, batch, arguments.passes) for batch in arguments.batches]
    columns = list(rows[0])
    show(
        f"batches, {arguments.layers} planted layers, {os.cpu_count()} cores",
        columns,
        [list(row.values()) for row in rows],
    )
    finish({"rows": rows})


if __name__ == "__main__":
    main()
