"""Measures what decoding several sequences at once brings: tokens per second, bytes read per token, remaining sparsity.

The planted cases are layers of a 7B's shape (benchmarks/shared/planted.py): each sequence has its own topic, and half
of the units are in DRAM. With prose7m-relu each sequence starts from its own passage of WikiText, and a third of the
units is in DRAM. Every batch is decoded with the case's selector and densely under the same budget, in turn. Tokens are
sampled, so that sequences differ. The first passes fill the caches and do not count.

For the sizes of `--renewed`, four times as many prompts get continuations of different lengths, geometrically
distributed. A batch that renews itself and batches that each wait for their longest sequence serve them in turn;
seconds are those of all passes, prefills included.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np
from tokenizers import Tokenizer

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, gain, main, option, spread
from benchmarks.shared.planted import (
    CASES,
    NUM_TOPICS,
    STRUCTURAL,
    VOCAB_SIZE,
    WIDTH_7B,
    artifact_of,
    plan_of,
    write_artifacts,
)
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.batch import BatchRoom, OnToken, Prompt, generate_batch, generate_each
from coldpress.runtime.generate.choice import choose_plan
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.trace import FETCH, Recorder
from coldpress.schemas.layout import Plan
from tests.support.artifacts import Recipe, build_artifact
from tests.support.data import data_folder
from tests.support.hf import load_hf, roles_of, spec_of

MOST = 32
"""Sequences of the largest batch."""
REAL = "prose7m-relu"
PROMPT_TOKENS, CONTEXT_LENGTH = 4, 512
WARM_PASSES = 3
IN_DRAM = 0.5
PROMPTS_PER_PLACE, MEAN, LONGEST = 4, 12, 48
"""A renewed batch: prompts per sequence of the batch, mean and greatest length of a continuation in tokens."""


def write_real(folder: Path) -> Path:
    """Writes the artifact of the real model and returns its path."""
    model = load_hf(data_folder() / "models" / REAL)
    spec = spec_of(model.config)
    recipe = Recipe(
        spec=spec,
        method="relu",
        density=0.3,
        format="int4_group32",
        cache="lfu",
        pinned_share=0.1,
        slots_share=0.23,
        context_length=CONTEXT_LENGTH,
        page_bytes=512,
    )
    return build_artifact(folder / REAL, recipe, roles_of(model, spec)).path


def plan_for(case: str, path: Path, selector: str | None) -> Plan:
    """Returns the case's plan, or a plan for another selector under the same budget."""
    manifest, plan = (open_artifact(path).manifest, None) if case == REAL else plan_of(path, IN_DRAM)
    return choose_plan(manifest.model_copy(update={"plans": (plan,)}) if plan else manifest, selector=selector)


def prompts_of(case: str, count: int) -> list[list[int]]:
    """Returns `count` prompts of token ids, each with words of its own topic or from its own passage."""
    if case == REAL:
        tokenizer = Tokenizer.from_file(str(data_folder() / "models" / REAL / "tokenizer.json"))
        text = (data_folder() / "corpora/wikitext-2/test.txt").read_text()[:400_000]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        step = len(ids) // MOST // PROMPTS_PER_PLACE
        return [ids[start : start + PROMPT_TOKENS] for start in range(0, count * step, step)]
    random = np.random.default_rng(5)
    words = random.integers(1, VOCAB_SIZE // NUM_TOPICS, (PROMPTS_PER_PLACE * MOST, PROMPT_TOKENS))
    return [(number % NUM_TOPICS + NUM_TOPICS * words[number]).tolist() for number in range(count)]


def drawn(count: int) -> list[Sampling]:
    """Returns the sampling of each sequence: temperature 1, seeded by its number."""
    return [Sampling(temperature=1.0, seed=seed) for seed in range(count)]


def density_of(recorder: Recorder, session: Session, batch: int) -> float:
    """Returns the mean share of a family's units that a pass asks for."""
    counts = {section.family: section.num_units for section in session.artifact.manifest.flash.sections}
    late = [event for event in recorder.events if event.kind == FETCH and event.token > WARM_PASSES * batch]
    return float(np.mean([event.ids.size / counts[event.family] for event in late]))


def decode(case: str, path: Path, batch: int, passes: int, rounds: int) -> Row:
    """Returns the row of a batch; each round decodes it sparsely and densely, from empty caches."""
    recorder, prompts, num_new = Recorder(), prompts_of(case, batch), 1 + WARM_PASSES + passes
    plans = {name: plan_for(case, path, selector) for name, selector in (("sparse", None), ("dense", "dense"))}
    found: dict[str, list[list[Token]]] = {name: [] for name in plans}
    density = 0.0
    for _ in range(rounds):
        for name, plan in plans.items():
            recorder.events.clear()
            with Session(path, plan=plan, recorder=recorder) as session:
                done = generate_batch(session, prompts, num_new, sampling=drawn(batch), ignore_eos=True)
                density = density if name == "dense" else density_of(recorder, session, batch)
            found[name].append([token for token in done.decoded if token.leads][WARM_PASSES:])
    sparse = found["sparse"]
    pass_s, dense_s = ([median(token.seconds for token in leading) for leading in each] for each in found.values())
    wait_s = [median(token.flash_s for token in leading) for leading in sparse]
    return {
        "pass_s": spread(pass_s),
        "tokens_per_s": batch / median(pass_s),
        "over_dense": gain(dense_s, pass_s),
        "union_density": density,
        "reads_per_token": median(fmean(token.reads for token in leading) for leading in sparse) / batch,
        "bytes_per_token": median(fmean(token.read_bytes for token in leading) for leading in sparse) / batch,
        "wait_share": spread([wait / whole for wait, whole in zip(wait_s, pass_s, strict=True)]),
        "hit_rate": median(hit_rate(leading) for leading in sparse),
    }


def hit_rate(tokens: Sequence[Token]) -> float:
    """Returns the share of the units that tokens requested which were in DRAM."""
    hits, misses = sum(token.hits for token in tokens), sum(token.misses for token in tokens)
    return hits / (hits + misses)


def serve(case: str, path: Path, batch: int, *, renewed: bool) -> Row:
    """Returns the costs of PROMPTS_PER_PLACE prompts per sequence of the batch, served from warm caches."""
    count, most_tokens = PROMPTS_PER_PLACE * batch, PROMPT_TOKENS + LONGEST
    lengths = np.minimum(np.random.default_rng(9).geometric(1 / MEAN, count), LONGEST).tolist()
    each = [Prompt(ids, sampling) for ids, sampling in zip(prompts_of(case, count), drawn(count), strict=True)]
    size, room = count if renewed else batch, BatchRoom(batch, most_tokens, batch * most_tokens)
    found: list[tuple[Token, ...]] = []
    with Session(path, plan=plan_for(case, path, None)) as session:
        generate_batch(session, [prompt.ids for prompt in each[:batch]], 1 + WARM_PASSES, ignore_eos=True)
        for start in range(0, count, size):
            part = slice(start, start + size)
            end = _until(lengths[part])
            found += generate_each(session, each[part], LONGEST, room, ignore_eos=True, on_token=end)
    assert list(map(len, found)) == lengths
    return {
        "num_tokens": sum(lengths),
        "seconds": sum(token.seconds for sequence in found for token in sequence),
        "prefills": sum(sequence[0].leads for sequence in found),
        "passes": sum(token.leads for sequence in found for token in sequence[1:]),
    }


def _until(lengths: Sequence[int]) -> OnToken:
    """Returns a callback that ends each sequence at its length."""
    counts = [0] * len(lengths)

    def end(number: int, _: Token) -> bool:
        counts[number] += 1
        return counts[number] == lengths[number]

    return end


def renew(case: str, path: Path, batch: int, rounds: int) -> Row:
    """Returns the row of a renewed batch and of batches that wait, served in turn."""
    turns = [[serve(case, path, batch, renewed=renewed) for renewed in (False, True)] for _ in range(rounds)]
    waiting, renewed = zip(*turns, strict=True)
    renewed_s = [one["seconds"] for one in renewed]
    return {
        "tokens_per_s": renewed[0]["num_tokens"] / median(renewed_s),
        "over_waiting": gain([one["seconds"] for one in waiting], renewed_s),
        "prefills": renewed[0]["prefills"],
        "waiting_prefills": waiting[0]["prefills"],
        "passes": renewed[0]["passes"],
        "waiting_passes": waiting[0]["passes"],
    }


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = option(
        ("relu-10", REAL), smoke=("relu-10",), full=(*CASES, REAL), choices=(*CASES, REAL), help="models"
    )
    batches: tuple[int, ...] = option((1, 8), smoke=(1, 2), full=(1, 2, 4, 8, 16, 32), help="sequences at once")
    renewed: tuple[int, ...] = option((4,), smoke=(2,), full=(4, 8), help="sequences at once in a renewed batch")
    layers: int = option(2, smoke=1, help="layers of the planted models")
    width: int = option(WIDTH_7B, smoke=512, help="hidden_size of the planted models, a multiple of 512")
    passes: int = option(3, smoke=2, full=6, help="passes per round that count")
    rounds: int = option(5, smoke=2, help="rounds; each runs all ways in turn")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].case": "model",
        "rows[].batch": "sequences that are decoded at once",
        "rows[].renewed": "true: a batch that renews itself, against batches that wait for their longest sequence",
        "rows[].tokens_per_s": "tokens per second of all sequences together, median of rounds; renewed: with prefills",
        "rows[].pass_s?": "median seconds of a pass, which decodes one token of every sequence, over rounds",
        "rows[].over_dense?": "seconds of a dense pass over seconds of a pass with the case's selector, per round",
        "rows[].union_density?": "share of a family's units that a pass requests, mean over passes and families",
        "rows[].reads_per_token?": "reads from flash in a pass, divided by the batch size",
        "rows[].bytes_per_token?": "bytes read from flash per decoded token",
        "rows[].wait_share?": "share of a pass's seconds spent waiting for flash",
        "rows[].hit_rate?": "share of requested units that were in DRAM, over all passes",
        "rows[].over_waiting?": "seconds of batches that wait over seconds of the renewed batch, taken in each round",
        "rows[].prefills?": "prefills of the renewed batch: passes that read flash for prompts",
        "rows[].waiting_prefills?": "prefills of the batches that wait",
        "rows[].passes?": "decoding passes of the renewed batch",
        "rows[].waiting_passes?": "decoding passes of the batches that wait",
        "over_one.*.*": "tokens per second over tokens per second of the first of --batches, by case and batch size",
    }
    is_timing = True
    needs_data = True
    full_minutes = 60

    def cells(self) -> Iterator[Cell]:
        for case in self.options.cases:
            for renewed, sizes in ((False, self.options.batches), (True, self.options.renewed)):
                yield from ({"case": case, "batch": batch, "renewed": renewed} for batch in sizes)

    def measure(self, cell: Cell) -> Iterator[Row]:
        case, batch, options = cell["case"], cell["batch"], self.options
        path = self.once(case, lambda: self.artifact(case))
        if cell["renewed"]:
            yield renew(case, path, batch, options.rounds)
        else:
            yield decode(case, path, batch, options.passes, options.rounds)

    def artifact(self, case: str) -> Path:
        """Returns the artifact of a case; removes the one of the case before."""
        folder = self.folder / "artifacts"
        shutil.rmtree(folder, ignore_errors=True)
        if case == REAL:
            return write_real(folder)
        write_artifacts(case, self.options.layers, folder, [STRUCTURAL], self.options.width)
        return artifact_of(case, STRUCTURAL, folder)

    def figures(self, rows: Rows) -> Figures:
        found: dict[str, dict[str, float]] = {}
        for row in rows:
            if not row["renewed"]:
                of_case = found.setdefault(row["case"], {})
                first = next(one for one in rows if one["case"] == row["case"])
                of_case[str(row["batch"])] = row["tokens_per_s"] / first["tokens_per_s"]
        return {"over_one": found}


if __name__ == "__main__":
    main("batch")
