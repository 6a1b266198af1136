"""Speculative decoding on small real models: are tokens the same, how often are drafts right, what does a token read?

`python -m benchmarks.speculative`. Each model runs prompts, text of the kind that it knows, greedily, plain and
with drafts: by lookup, and by another model of the same vocabulary, whose own reads are not in the figures. Reads and
bytes are over those of plain decoding, seconds those of a modelled device. A third of the units are in DRAM.

The map asks when drafts pay: selections of text that prose7m-relu read are replayed through the simulator as passes of
1 + n tokens, of which as many stand as drafts that are right with probability a would let (geometric, seeded), at
several budgets. What a wrong draft selects is taken from the token that stood there. Drafts cost nothing, as by lookup.
Units are of fp16 and pages of 512 bytes, so that a read brings few of them, as it does where models are large.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tokenizers import Tokenizer

from benchmarks.shared.report import finish, show
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.drafts import lookup
from coldpress.runtime.generate.draft_model import DraftModel
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.speculation import Passes
from coldpress.runtime.generate.statistics import drafted
from coldpress.runtime.plan.budget import fixed_bytes, refit
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import END, FETCH, Event, Recorder
from coldpress.schemas.metrics import RunMetrics
from tests.support.artifacts import Recipe, build_artifact
from tests.support.data import ROOT, data_folder
from tests.support.hf import load_hf, roles_of, spec_of

MODELS = ("demo", "stories260k", "tinystories656k", "tinystories656k-relu", "prose7m", "prose7m-relu")
DRAFTS = {"tinystories656k": "tinystories656k-relu", "prose7m": "prose7m-relu", "prose7m-relu": "prose7m"}
LENGTHS = (2, 4, 8)
PROMPT_TOKENS, NEW_TOKENS, NUM_PROMPTS = 48, 48, 2
MAP_TOKENS = 96
ACCEPTANCE, DRAM_SHARES = (0.2, 0.4, 0.6, 0.8, 0.95), (0.1, 0.3, 0.5, 0.8)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        built = {name: build(Path(folder), name) for name in {*arguments.models} | used_drafts(arguments)}
        rows = [row for name in arguments.models for row in measure(built, name)]
        show(
            "drafts against plain greedy decoding",
            (
                "model",
                "draft",
                "per pass",
                "same",
                "acceptance",
                "tokens/pass",
                "reads",
                "bytes",
                "bytes, all kept",
                "gain",
            ),
            [[*row.values()] for row in rows],
        )
        fine = build(Path(folder), "prose7m-relu", format="fp16", page_bytes=512, collapse_gap_bytes=0)
        grid = break_even(fine)
    show("break-even", ("DRAM", "hit rate", "a", *(f"n = {n}" for n in LENGTHS)), [[*row.values()] for row in grid])
    same = sum(row["same"] for row in rows)
    finish({"rows": rows, "map": grid, "identical_runs": same, "runs": NUM_PROMPTS * len(rows)})


def used_drafts(arguments: argparse.Namespace) -> set[str]:
    """The models that draft for those that are asked for."""
    return {DRAFTS[name] for name in arguments.models if name in DRAFTS}


def source(name: str) -> Path:
    """The checkpoint of a model."""
    return ROOT / "demo/model" if name == "demo" else data_folder() / "models" / name


def build(folder: Path, name: str, **changes: Any) -> Path:
    """An artifact of a model that leaves out exact zeros where it has them, else the smaller half of the inputs."""
    model = load_hf(source(name))
    spec = spec_of(model.config)
    method = "relu" if spec.exact_zeros else "topk"
    recipe = Recipe(spec=spec, method=method, density=0.5, format="int4_group32", context_length=256, cache="lru")
    recipe = replace(recipe, pinned_share=0.0, slots_share=1 / 3, **changes)
    return build_artifact(folder / (name + "".join(changes)), recipe, roles_of(model, spec)).path


def texts(name: str, length: int) -> list[list[int]]:
    """Prompts that the model has a chance with."""
    tokenizer = Tokenizer.from_file(str(source(name) / "tokenizer.json"))
    corpora = data_folder() / "corpora"
    if name == "demo":
        text = (ROOT / "README.md").read_text()
    elif name.startswith("prose"):
        text = (corpora / "wikitext-2/test.txt").read_text()
    else:
        text = (corpora / "tinystories/tiny_stories.txt").read_text()
    ids = tokenizer.encode(text[:60_000]).ids
    step = len(ids) // NUM_PROMPTS
    return [ids[start : start + length] for start in range(0, NUM_PROMPTS * step, step)]


def measure(built: dict[str, Path], name: str) -> list[dict[str, Any]]:
    """Rows of one model: each draft and length against plain decoding in the same DRAM."""
    prompts = texts(name, PROMPT_TOKENS)
    with Session(built[name], flash="simulated") as session:
        plain = [session.generate(ids, NEW_TOKENS, ignore_eos=True) for ids in prompts]
        drafts: dict[str, Any] = {"lookup": lookup.Plugin()}
        if name in DRAFTS:
            drafts[DRAFTS[name]] = DraftModel(Session(built[DRAFTS[name]], flash="simulated"), session.artifact)
        return [
            against(plain, session, prompts, {"model": name, "draft": label, "per_pass": count}, draft)
            for label, draft in drafts.items()
            for count in LENGTHS
        ]


def against(
    plain: list[Any], session: Session, prompts: list[list[int]], row: dict[str, Any], draft: Any
) -> dict[str, Any]:
    """One row: with the cache that follows what is accepted, and with one that keeps what any draft used."""

    def run() -> list[Any]:
        settings = {"draft": draft, "draft_tokens": row["per_pass"]}
        return [session.generate(ids, NEW_TOKENS, ignore_eos=True, **settings) for ids in prompts]

    found = run()
    with mock.patch.object(Passes, "_expected", lambda self, num_drafts: 1 + num_drafts):
        all_kept = run()
    counted = drafted([token for run in found for token in run.tokens[1:]])
    assert counted is not None

    def ratio(figure: str, runs: list[Any]) -> float:
        return sum(getattr(run.metrics, figure) for run in runs) / sum(getattr(run.metrics, figure) for run in plain)

    return row | {
        "same": sum(one.token_ids == other.token_ids for one, other in zip(plain, found, strict=True)),
        "acceptance": counted.acceptance,
        "tokens_per_pass": counted.tokens_per_pass,
        "reads": ratio("reads", found),
        "read_bytes": ratio("read_bytes", found),
        "read_bytes_all_kept": ratio("read_bytes", all_kept),
        "gain": seconds(plain) / seconds(found),
    }


def seconds(runs: list[Any]) -> float:
    """Modelled, of all tokens; a draft model's own are not in them."""
    return sum(run.metrics.modelled_s for run in runs)


def break_even(path: Path) -> list[dict[str, Any]]:
    """Gain of a modelled device by DRAM, acceptance and drafts of a pass."""
    recorder = Recorder()
    with Session(path, flash="simulated", recorder=recorder) as session:
        blocks = np.array([texts("prose7m-relu", MAP_TOKENS)[0]])
        session.perplexity(blocks, sparse=True)
    tokens = by_token([event for event in recorder.events if event.kind == FETCH])
    artifact = open_artifact(path)
    plan, rows = artifact.manifest.plans[0], []
    units = sum(section.length_bytes for section in artifact.manifest.flash.sections)
    for share in DRAM_SHARES:
        sized = refit(artifact.manifest, plan, fixed_bytes(artifact.manifest, plan) + int(share * units))
        alone = simulate(artifact, sized, passes(tokens, 0, 0.0))
        for acceptance in ACCEPTANCE:
            gains = {
                f"n_{count}": per_token(alone) / per_token(simulate(artifact, sized, passes(tokens, count, acceptance)))
                for count in LENGTHS
            }
            rows.append({"dram_share": share, "hit_rate": alone.hit_rate, "acceptance": acceptance, **gains})
    return rows


def per_token(metrics: RunMetrics) -> float:
    """Modelled seconds of a token."""
    return metrics.decode_s / metrics.num_tokens


def by_token(fetches: list[Event]) -> list[list[Event]]:
    """The fetches of each token."""
    found: list[list[Event]] = [[] for _ in range(max(event.token for event in fetches))]
    for event in fetches:
        found[event.token - 1].append(event)
    return found


def passes(tokens: list[list[Event]], num_drafts: int, acceptance: float) -> list[Event]:
    """The trace of a run whose drafts are right with probability `acceptance`, each for itself."""
    random, trace, at = np.random.default_rng(0), list[Event](), 0
    num_kept = 1 + round(num_drafts * acceptance)
    while at + num_drafts < len(tokens):
        accepted = 0
        while accepted < num_drafts and random.random() < acceptance:
            accepted += 1
        of_pass = tokens[at : at + 1 + num_drafts]
        for events in zip(*of_pass, strict=True):
            ids, kept = (
                np.unique(np.concatenate([event.ids for event in some])) for some in (events, events[:num_kept])
            )
            trace.append(Event(FETCH, at + 1, events[0].layer, events[0].family, ids, kept))
        at += 1 + accepted
        trace.append(Event(END, at, 0, trace[-1].family, np.empty(0, np.int32)))
    return trace


if __name__ == "__main__":
    main()
