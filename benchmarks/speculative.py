"""Measures speculative decoding on small real models: equal tokens, acceptance, and reads per token.

Each model runs prompts, text of the kind that it knows, greedily, without drafts and with drafts: by lookup, and by
another model of the same vocabulary. Reads and bytes are shares of a run without drafts and leave out the draft model;
seconds are modelled and include it. A third of the units of both models is in DRAM.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from coldpress.runtime.drafts import lookup
from coldpress.runtime.generate.draft_model import DraftModel
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import drafted
from tests.support.artifacts import Recipe, build_artifact
from tests.support.data import ROOT, data_folder
from tests.support.hf import load_hf, roles_of, spec_of

MODELS = ("relu-demo", "stories260k", "tinystories656k", "tinystories656k-relu", "prose7m", "prose7m-relu")
DRAFTS = {"tinystories656k": "tinystories656k-relu", "prose7m": "prose7m-relu", "prose7m-relu": "prose7m"}
PROMPT_TOKENS, NUM_PROMPTS = 48, 2


def source(name: str) -> Path:
    return ROOT / "demo/model" if name == "relu-demo" else data_folder() / "models" / name


def build(folder: Path, name: str) -> Path:
    """Builds an artifact of a model that skips exact zeros where it has them, else the smaller half of the inputs."""
    model = load_hf(source(name))
    spec = spec_of(model.config)
    method = "relu" if spec.exact_zeros else "topk"
    recipe = Recipe(spec=spec, method=method, density=0.5, format="int4_group32", context_length=256, cache="lru")
    recipe = replace(recipe, pinned_share=0.0, slots_share=1 / 3)
    return build_artifact(folder / name, recipe, roles_of(model, spec)).path


def texts(name: str, length: int) -> list[list[int]]:
    """Returns prompts of the kind of text that the model knows."""
    tokenizer = Tokenizer.from_file(str(source(name) / "tokenizer.json"))
    corpora = data_folder() / "corpora"
    if name == "relu-demo":
        text = (ROOT / "README.md").read_text()
    elif name.startswith("prose"):
        text = (corpora / "wikitext-2/test.txt").read_text()
    else:
        text = (corpora / "tinystories/tiny_stories.txt").read_text()
    ids = tokenizer.encode(text[:60_000]).ids
    step = len(ids) // NUM_PROMPTS
    return [ids[start : start + length] for start in range(0, NUM_PROMPTS * step, step)]


def against(
    plain: list[Any], session: Session, prompts: list[list[int]], count: int, new_tokens: int, draft: Any
) -> Row:
    """Returns the row of runs with `count` drafts per pass, compared with the runs without drafts."""
    found, draft_s = [], 0.0
    for ids in prompts:
        found.append(session.generate(ids, new_tokens, ignore_eos=True, draft=draft, draft_tokens=count))
        draft_s += draft.modelled_s() if isinstance(draft, DraftModel) else 0.0
    counted = drafted([token for run in found for token in run.tokens[1:]])
    assert counted is not None
    plain_s, found_s = total(plain, "modelled_s"), total(found, "modelled_s") + draft_s
    return {
        "same": sum(one.token_ids == other.token_ids for one, other in zip(plain, found, strict=True)),
        "acceptance": counted.acceptance,
        "tokens_per_pass": counted.tokens_per_pass,
        "reads": total(found, "reads") / total(plain, "reads"),
        "read_bytes": total(found, "read_bytes") / total(plain, "read_bytes"),
        "draft_share": draft_s / found_s,
        "gain": plain_s / found_s,
    }


def total(runs: list[Any], figure: str) -> float:
    """Returns the sum of a figure of the larger model over all runs."""
    return sum(getattr(run.metrics, figure) for run in runs)


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("relu-demo", "tinystories656k"), smoke=("tinystories656k",), full=MODELS, choices=MODELS, help="models"
    )
    lengths: tuple[int, ...] = option((2, 4, 8), smoke=(4,), help="drafted tokens per pass")
    new_tokens: int = option(48, smoke=8, help="new tokens per prompt")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "model",
        "rows[].draft": "lookup, or the model that drafts",
        "rows[].per_pass": "drafted tokens per pass",
        "rows[].same": "number of runs with the same tokens as without drafts",
        "rows[].acceptance": "share of drafted tokens that the model accepts",
        "rows[].tokens_per_pass": "new tokens per pass",
        "rows[].reads": "reads from flash over reads without drafts",
        "rows[].read_bytes": "bytes read over bytes read without drafts",
        "rows[].draft_share": "share of the modelled seconds that the draft model takes",
        "rows[].gain": "modelled seconds without drafts over the seconds with them",
        "identical_runs": "number of runs with the same tokens as without drafts, over all models, drafts and lengths",
        "runs": "number of runs with drafts",
    }
    needs_data = True
    full_minutes = 25

    def cells(self) -> Iterator[Cell]:
        for model in self.options.models:
            for draft in ("lookup", *([DRAFTS[model]] if model in DRAFTS else [])):
                yield {"model": model, "draft": draft}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per number of drafts."""
        name, prompts = cell["model"], texts(cell["model"], PROMPT_TOKENS)
        with Session(self._built(name), flash="simulated", modelled=True) as session:
            plain = [session.generate(ids, self.options.new_tokens, ignore_eos=True) for ids in prompts]
            draft: Any = lookup.Plugin()
            if cell["draft"] != "lookup":
                path, size = self._built(cell["draft"]), session.decoder.spec.vocab_size
                draft = DraftModel(str(path), size, flash="simulated", modelled=True)
            for count in self.options.lengths:
                yield {"per_pass": count} | against(plain, session, prompts, count, self.options.new_tokens, draft)

    def _built(self, name: str) -> Path:
        path = self.folder / name
        return path if path.exists() else build(self.folder, name)

    def figures(self, rows: Rows) -> Figures:
        return {"identical_runs": sum(row["same"] for row in rows), "runs": NUM_PROMPTS * len(rows)}


if __name__ == "__main__":
    main("speculative")
