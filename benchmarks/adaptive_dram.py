"""Changes one artifact's DRAM budget from 20 to 100 % of its weights during one text: memory, speed, tokens.

Another process generates one text; between tokens it gets another budget, up and down again. It reads its resident
memory at the end of each phase and before it opens the artifact; the difference is compared with the budget. Before
that, it has run another, tiny artifact, so that the interpreter and libraries hold their own memory already. Speed is
that of the phase's second half, in one run, on real flash (O_DIRECT). The text is compared with that of a run with one
budget. The model is random and its layers are as similar as trained ones, so no single unit decides on a token.
Predictors choose its neurons and do not depend on residency. Earlier tokens are penalized: otherwise such a model
repeats itself and soon needs no flash.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option, spread
from benchmarks.harness.apart import apart
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.similar import similar_weights

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0, 0.6, 0.2)
PROMPT = [3, 14, 15, 9, 26]
SIMILARITY = 0.6
"""Cosine between the MLP inputs of consecutive layers (ActiveFlow, Fig. 17a)."""
SAMPLING = Sampling(repetition_penalty=2.0)


@dataclass(frozen=True)
class Options:
    tokens_per_phase: int = option(24, smoke=4, full=96, help="tokens decoded under each budget")
    intermediate_size: int = option(4096, smoke=2048, help="neurons per layer")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].share": "DRAM budget as a share of the bytes of all weights",
        "rows[].budget_bytes": "DRAM budget of the phase in bytes",
        "rows[].used_bytes": "bytes that the runtime counts against the budget at the end of the phase",
        "rows[].resident_bytes": "resident bytes of the process minus those before it opened the artifact",
        "rows[].beyond_bytes": "resident_bytes minus budget_bytes; negative where the process stays below its budget",
        "rows[].hit_rate": "share of requested units that were in DRAM, mean over tokens of the phase's second half",
        "rows[].token_s": "seconds per token in the phase's second half",
        "rows[].tokens_per_s": "tokens per second: 1 over the median of token_s",
        "rows[].weights_bytes": "bytes of the resident tensors and of all units",
        "rows[].same_tokens": "whether the whole text equals that of a run under one budget",
        "most_beyond_bytes": "largest beyond_bytes of all phases",
        "rising": "whether tokens per second never fell while the budget rose from 20 to 100 %",
        "fastest_over_slowest": "tokens per second at 100 % over those in the first phase at 20 %",
    }
    is_timing = True
    full_minutes = 6

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per phase."""
        path = build(self.folder / "a", self.options.intermediate_size)
        weights, count = weight_bytes(path), self.options.tokens_per_phase
        budgets = [int(share * weights) for share in SHARES]
        with Session(path, dram_budget_bytes=budgets[0]) as session:
            told = session.generate(PROMPT, len(SHARES) * count, sampling=SAMPLING, ignore_eos=True)
        tiny = build_artifact(self.folder / "tiny", Recipe(method="predictor")).path
        phases = apart(self, "phases", str(tiny), str(path), budgets)
        same = [token for phase in phases for token, _, _ in phase["tokens"]] == list(told.token_ids)
        for share, budget, phase in zip(SHARES, budgets, phases, strict=True):
            yield row_of(share, budget, phase) | {"weights_bytes": weights, "same_tokens": same}

    def phases(self, tiny: str, path: str, budgets: list[int]) -> list[dict[str, Any]]:
        """Returns each phase's tokens (id, seconds, hit rate) and bytes; runs in its own process."""
        with Session(tiny) as session:
            session.generate(PROMPT, 16, sampling=SAMPLING, ignore_eos=True)
        process, count = psutil.Process(), self.options.tokens_per_phase
        before_bytes, found = process.memory_info().rss, list[dict[str, Any]]()
        with Session(path, dram_budget_bytes=budgets[0]) as session:
            tokens = session.stream(PROMPT, len(budgets) * count, sampling=SAMPLING, ignore_eos=True)
            for budget in budgets:
                if found:
                    session.resize(budget)
                phase = [(token.id, token.seconds, token.hit_rate) for token in islice(tokens, count)]
                used = {"used_bytes": session.store.dram_used_bytes}
                found.append({"tokens": phase, **used, "resident_bytes": process.memory_info().rss - before_bytes})
            tokens.close()
        return found

    def figures(self, rows: Rows) -> Figures:
        rising = [row["tokens_per_s"] for row in rows[: SHARES.index(1.0) + 1]]
        return {
            "most_beyond_bytes": max(row["beyond_bytes"] for row in rows),
            "rising": rising == sorted(rising),
            "fastest_over_slowest": rising[-1] / rising[0],
        }


def build(path: Path, intermediate_size: int) -> Path:
    """Builds a random model that is nearly all neurons on flash: 200 MB with 4,096 neurons a layer."""
    spec = small_spec(
        hidden_size=768,
        intermediate_size=intermediate_size,
        num_attention_heads=12,
        max_position_embeddings=256,
        hidden_act="silu",
    )
    shares = {"pinned_share": 0.0, "read_buffer_bytes": 4 << 20, "predictor_rank": 8}
    recipe = Recipe(spec=spec, method="predictor", context_length=256, format="fp16", **shares)
    return build_artifact(path, recipe, similar_weights(spec, SIMILARITY)).path


def weight_bytes(path: Path) -> int:
    """Returns the bytes of the resident tensors and the units."""
    manifest = open_artifact(path).manifest
    return manifest.plans[0].resident_bytes + sum(section.length_bytes for section in manifest.flash.sections)


def row_of(share: float, budget: int, phase: dict[str, Any]) -> Row:
    """Returns the row of one phase."""
    settled = phase["tokens"][len(phase["tokens"]) // 2 :]
    token_s = spread([seconds for _, seconds, _ in settled])
    return {
        "share": share,
        "budget_bytes": budget,
        "used_bytes": phase["used_bytes"],
        "resident_bytes": phase["resident_bytes"],
        "beyond_bytes": phase["resident_bytes"] - budget,
        "hit_rate": sum(hit_rate for _, _, hit_rate in settled) / len(settled),
        "token_s": token_s,
        "tokens_per_s": 1 / token_s["median"],
    }


if __name__ == "__main__":
    main("adaptive_dram")
