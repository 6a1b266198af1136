"""Runs a dense model and a mixture under budgets of 20 to 100 % of what the whole model takes in DRAM: equal tokens,
memory below the budget.

Each artifact of a real model is built by the rules with the dense selector, so that every token uses all units, or all
units of the experts that its router picks. The random ones are larger: 12 layers with 150 million weights in int8. For
each budget another process generates the same text greedily. It has run a tiny artifact before, so that interpreter and
libraries hold their memory already; from then on the kernel counts the process's memory, with the page cache that its
files take, in a control group (benchmarks/shared/memory_group.py). The kernel's count is up to two megabytes above its
own statistics (memory.stat), so that smaller budgets cannot be judged. Where a share is less than the least budget that
the plan can be run with, the least one takes its place.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.harness.apart import apart, run_here
from benchmarks.shared.builds import MODELS, artifact_in, build, settings
from benchmarks.shared.memory_group import MemoryGroup, drop_pages, memory_group
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import choose_plan, least_budget_bytes, whole_bytes
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import small_spec

RANDOM: dict[str, dict[str, Any]] = {
    "random-dense": {"intermediate_size": 4096},
    "random-mixture": {"intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 2, "hidden_act": "silu"},
}
"""Model -> fields of its spec, beside those that all have."""
WIDE = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "head_dim": 64,
    "rotary_dim": 64,
    "max_position_embeddings": 512,
}
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)
PROMPT = [1, 3, 14, 15, 9, 26, 5, 35]


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m", "tinystories-mixtral-8x", *RANDOM),
        smoke=("tinystories-mixtral-8x",),
        choices=[*(name for name in MODELS if name != "relu-demo"), *RANDOM],
        help="models",
    )
    tokens: int = option(96, smoke=16, full=112, help="new tokens of the text")
    short: bool = option(True, full=False, help="calibrate and score on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].budget_share": "DRAM budget as a share of whole_bytes that was asked for",
        "rows[].whole_bytes": "DRAM with which the runtime holds every unit and reads nothing",
        "rows[].budget_bytes": "DRAM budget in bytes: the share, or the least that the plan can be run with",
        "rows[].is_least": "whether the budget is the least one, since the share is less",
        "rows[].peak_bytes": "most bytes that the kernel counted, page cache included, less those before the artifact",
        "rows[].settled_bytes": "bytes that the kernel counts when the text ends, less those before the artifact",
        "rows[].read_bytes": "bytes read from flash: prompt, text and pinned units",
        "rows[].tokens_equal": "whether the text is that of the run with everything in DRAM",
        "all_equal": "whether every text is that of the run with everything in DRAM",
        "all_below": "whether peak_bytes is below budget_bytes in every row",
    }
    needs_data = True
    needs_root = True
    over = {"model": "models"}
    full_minutes = 5

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per budget."""
        model = cell["model"]
        path = self._random(model) if model in RANDOM else self._built(model)
        manifest = open_artifact(path).manifest
        plan = choose_plan(manifest)
        whole, least = whole_bytes(manifest, plan), least_budget_bytes(manifest, plan)
        tiny = build_artifact(self.folder / f"{model}-tiny", Recipe(method="dense")).path
        with Session(path, dram_budget_bytes=whole) as session:
            told = list(session.generate(PROMPT, self.options.tokens, ignore_eos=True).token_ids)
        for share in SHARES:
            budget = max(least, int(share * whole))
            drop_pages(path)
            with memory_group() as group:
                command = (self, "generated", str(tiny), str(path), budget, str(group.folder))
                found = apart(*command, run=lambda argv, group=group: run_here([*group.words, *argv]))
                peak_bytes = group.peak_bytes - found["before_bytes"]
            yield {
                "budget_share": share,
                "whole_bytes": whole,
                "budget_bytes": budget,
                "is_least": budget > int(share * whole),
                "peak_bytes": peak_bytes,
                "settled_bytes": found["settled_bytes"],
                "read_bytes": found["read_bytes"],
                "tokens_equal": found["tokens"] == told,
            }

    def _built(self, model: str) -> Path:
        config: dict[str, Any] = settings(model, short=self.options.short) | {"method": "dense", "cache": "lru"}
        return artifact_in(build(self.folder / model, **config))

    def _random(self, model: str) -> Path:
        spec = small_spec(vocab_size=512, **WIDE, **RANDOM[model])
        recipe = Recipe(spec=spec, method="dense", format="int8_group32", context_length=256, read_buffer_bytes=1 << 20)
        return build_artifact(self.folder / model, recipe).path

    def generated(self, tiny: str, path: str, budget: int, group: str) -> dict[str, Any]:
        """Returns the text under a budget, and the process's memory before it; runs in the process that is counted."""
        with Session(tiny) as session:
            session.generate(PROMPT, 16, ignore_eos=True)
        memory = MemoryGroup(Path(group))
        before_bytes = memory.begin()
        with Session(path, dram_budget_bytes=budget) as session:
            done = session.generate(PROMPT, self.options.tokens, ignore_eos=True)
            counters = session.store.counters
            read_bytes = counters.load_read_bytes + counters.prefill_read_bytes + counters.read_bytes
            settled_bytes = memory.used_bytes - before_bytes
        found = {"before_bytes": before_bytes, "settled_bytes": settled_bytes, "read_bytes": read_bytes}
        return found | {"tokens": list(done.token_ids)}

    def figures(self, rows: Rows) -> Figures:
        return {
            "all_equal": all(row["tokens_equal"] for row in rows),
            "all_below": all(row["peak_bytes"] < row["budget_bytes"] for row in rows),
        }


if __name__ == "__main__":
    main("budgets")
