"""What decoding several sequences at once brings: tokens per second, what a token reads, and what is left of sparsity.

`python -m benchmarks.batch [--cases relu-10 …] [--batches 1 2 …] [--layers 2] [--passes 6]`. Planted layers of a
7B's shape (benchmarks/shared/planted.py), each sequence on a topic of its own, with half of the units in DRAM; and
prose7m-relu on WikiText, each sequence another passage, a third of its units in DRAM. Every batch is decoded with the
case's selector and, for comparison, densely under the same budget. Tokens are drawn, so that sequences differ. The
first passes, which fill caches, do not count.

Then, for the sizes of `--renewed`, ROUNDS times as many prompts whose continuations are of different lengths (as if
drawn to end with the same chance behind every token, LONGEST at most): in a batch that renews itself, and in batches of
which each waits for its longest; seconds are those of all passes, prefills among them.

The last line is {rows: [{case, batch, tokens_per_s, per_sequence, over_one, over_dense, union_density, reads_per_token,
bytes_per_token, …}], renewed: [{case, batch, tokens_per_s, over_waiting, prefills, …}]}: `over_one` is tokens per
second over those of the first size; `union_density` the share of its family's units that a pass asks for, in the mean;
`prefill_over_alone` and `prefill_bytes_over_alone` seconds and bytes of prompts one after the other over all at once;
`over_waiting` seconds of the batches that wait over those of the one that renews itself.
"""

import argparse
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.shared.planted import CASES, NUM_TOPICS, STRUCTURAL, VOCAB_SIZE, artifact_of, plan_of, write_artifacts
from benchmarks.shared.report import finish, show
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.batch import Batch, OnToken, Prompt, Room, generate_batch, generate_each
from coldpress.runtime.generate.choice import choose_plan
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.trace import FETCH, Recorder
from coldpress.schemas.layout import Plan
from tests.support.artifacts import Recipe, build_artifact
from tests.support.data import data_folder
from tests.support.hf import load_hf, roles_of, spec_of

BATCHES = (1, 2, 4, 8, 16, 32)
REAL = "prose7m-relu"
PROMPT_TOKENS, CONTEXT_LENGTH = 4, 512
WARM_PASSES = 3
IN_DRAM = 0.5
RENEWED = (4, 8)
ROUNDS, MEAN, LONGEST = 4, 12, 48


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


def write_real(folder: Path) -> Path:
    """The artifact of the real model."""
    model = load_hf(data_folder() / "models" / REAL)
    recipe = Recipe(spec=spec_of(model.config), method="relu", density=0.3, format="int4_group32", cache="lfu")
    changes = {"pinned_share": 0.1, "slots_share": 0.23, "context_length": CONTEXT_LENGTH, "page_bytes": 512}
    return build_artifact(folder / REAL, Recipe(**{**vars(recipe), **changes}), roles_of(model, recipe.spec)).path


def artifact(case: str, layers: int, folder: Path) -> Path:
    """That of the case, which is made where it is not there yet."""
    if case != REAL:
        write_artifacts(case, layers, folder, [STRUCTURAL])
        return artifact_of(case, STRUCTURAL, folder)
    return folder / REAL if (folder / REAL).exists() else write_real(folder)


def plan_for(case: str, path: Path, selector: str | None) -> Plan:
    """The case's plan, or with another selector under the same budget."""
    manifest, plan = (open_artifact(path).manifest, None) if case == REAL else plan_of(path, IN_DRAM)
    return choose_plan(manifest.model_copy(update={"plans": (plan,)}) if plan else manifest, selector=selector)


def prompts_of(case: str, count: int) -> list[list[int]]:
    """A prompt for each sequence: words of a topic, or a passage."""
    if case == REAL:
        tokenizer = Tokenizer.from_file(str(data_folder() / "models" / REAL / "tokenizer.json"))
        text = (data_folder() / "corpora/wikitext-2/test.txt").read_text()[:400_000]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        step = len(ids) // max(BATCHES) // ROUNDS
        return [ids[start : start + PROMPT_TOKENS] for start in range(0, count * step, step)]
    random = np.random.default_rng(5)
    words = random.integers(1, VOCAB_SIZE // NUM_TOPICS, (ROUNDS * max(BATCHES), PROMPT_TOKENS))
    return [(number % NUM_TOPICS + NUM_TOPICS * words[number]).tolist() for number in range(count)]


def drawn(count: int) -> list[Sampling]:
    """How each sequence's tokens are chosen."""
    return [Sampling(temperature=1.0, seed=seed) for seed in range(count)]


def decode(case: str, path: Path, batch: int, passes: int, selector: str | None) -> Decoded:
    """One batch, with the plan's selector or another."""
    recorder, prompts = Recorder(), prompts_of(case, batch)
    with Session(path, plan=plan_for(case, path, selector), recorder=recorder) as session:
        num_new = 1 + WARM_PASSES + passes
        done = generate_batch(session, prompts, num_new, sampling=drawn(batch), ignore_eos=True)
        counts = {section.family: section.num_units for section in session.artifact.manifest.flash.sections}
    late = [event for event in recorder.events if event.kind == FETCH and event.token > WARM_PASSES * batch]
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


@dataclass(frozen=True)
class Served:
    """What prompts with continuations of different lengths took, caches filled before."""

    seconds: float
    """Of prefills and passes."""
    prefills: int
    """How often flash was read for prompts."""
    passes: int
    num_tokens: int


def serve(case: str, path: Path, batch: int, *, renewed: bool) -> Served:
    """ROUNDS times as many prompts as go on at once."""
    count = ROUNDS * batch
    lengths = np.minimum(np.random.default_rng(9).geometric(1 / MEAN, count), LONGEST).tolist()
    each = [Prompt(ids, sampling) for ids, sampling in zip(prompts_of(case, count), drawn(count), strict=True)]
    with Session(path, plan=plan_for(case, path, None)) as session:
        generate_batch(session, [prompt.ids for prompt in each[:batch]], 1 + WARM_PASSES, ignore_eos=True)
        size = count if renewed else batch
        found = [
            sequence
            for start in range(0, count, size)
            for sequence in _ended(session, each[start : start + size], lengths[start : start + size], batch)
        ]
    assert list(map(len, found)) == lengths
    tokens = [token for sequence in found for token in sequence]
    return Served(
        seconds=sum(token.seconds for token in tokens),
        prefills=sum(sequence[0].leads for sequence in found),
        passes=sum(token.leads for sequence in found for token in sequence[1:]),
        num_tokens=len(tokens),
    )


def _ended(
    session: Session, prompts: Iterable[Prompt], lengths: Sequence[int], batch: int
) -> Iterator[tuple[Token, ...]]:
    """Each prompt's new tokens, of which there are as many as its length."""
    longest = PROMPT_TOKENS + LONGEST
    room = Room(batch, longest, batch * longest)
    return generate_each(session, prompts, LONGEST, room, ignore_eos=True, on_token=_until(lengths))


def _until(lengths: Sequence[int]) -> OnToken:
    counts = [0] * len(lengths)

    def end(number: int, _: Token) -> bool:
        counts[number] += 1
        return counts[number] == lengths[number]

    return end


def measure(case: str, path: Path, batch: int, passes: int) -> dict[str, Any]:
    """A row."""
    sparse, dense = (decode(case, path, batch, passes, selector) for selector in (None, "dense"))
    with Session(path, plan=plan_for(case, path, None)) as session:
        alone = [session.generate(prompt, 1).metrics for prompt in prompts_of(case, batch)]
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


def compare(case: str, path: Path, batch: int) -> dict[str, Any]:
    """A row of batches that renew themselves; each way is taken twice, since machines slow down."""
    first, renewed, again, last = (serve(case, path, batch, renewed=renewed) for renewed in (False, True, True, False))
    renewed_s, waiting = renewed.seconds + again.seconds, last
    return {
        "case": case,
        "batch": batch,
        "tokens_per_s": 2 * renewed.num_tokens / renewed_s,
        "over_waiting": (first.seconds + last.seconds) / renewed_s,
        "prefills": renewed.prefills,
        "waiting_prefills": waiting.prefills,
        "passes": renewed.passes,
        "waiting_passes": waiting.passes,
    }


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, REAL], default=[*CASES, REAL], metavar="CASE")
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES, metavar="N")
    parser.add_argument("--renewed", nargs="*", type=int, default=RENEWED, metavar="N")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where artifacts are kept for the next run")
    arguments = parser.parse_args()
    rows, renewed = list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        folder = arguments.folder or Path(temporary)
        for case in arguments.cases:
            path = artifact(case, arguments.layers, folder)
            of_case = [measure(case, path, batch, arguments.passes) for batch in arguments.batches]
            rows += [{**row, "over_one": row["tokens_per_s"] / of_case[0]["tokens_per_s"]} for row in of_case]
            renewed += [compare(case, path, batch) for batch in arguments.renewed]
    title = f"{arguments.layers} planted layers, {os.cpu_count()} cores"
    for what, found in (("batches", rows), ("batches that renew themselves", renewed)):
        if found:
            show(f"{what}: {title}", list(found[0]), [list(row.values()) for row in found])
    finish({"rows": rows, "renewed": renewed})


if __name__ == "__main__":
    main()
