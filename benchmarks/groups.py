"""Layers that lie together on flash (`layers_per_group`), read on demand: the same tokens, and what reading them costs.

The model is built with top-k at half of the units, once per group size, and generates from the same prompt. Speed is
modelled for the device. A read of one layer's units has those of the others between them, so on demand groups only
cost; what they are for is reading ahead for several layers at once (ActiveFlow 3, Fig. 9). The jobs of a build are
forked from a process that has imported the libraries.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Cell, Row, Table, option
from benchmarks.harness.command import main
from benchmarks.shared.builds import MODELS, artifact_in, build, settings
from coldpress.runtime.generate.session import Session
from coldpress.runtime.text.tokenizer import TextCodec

PROMPT = "The history of the river begins with"
CHOSEN = {"method": "topk", "density": 0.5, "max_ppl_ratio": "off", "min_top1_agreement": "off"}


@dataclass(frozen=True)
class Options:
    """What is built."""

    groups: tuple[int, ...] = option((1, 2, 4), smoke=(2,), help="layers of a group")
    model: str = option("prose7m", smoke="stories260k", choices=MODELS, help="model")
    dram_budget: str = option("60%", smoke="98%", help="DRAM budget")
    device: str = option("pixel6", help="device profile")
    tokens: int = option(64, smoke=16, help="tokens to generate")
    short: bool = option(False, smoke=True, help="calibrate and score on less text")


class Plugin(Benchmark[Options]):
    """Generates one text for each group size."""

    keys = {
        "rows[].layers_per_group": "layers of a group",
        "rows[].reads_per_token": "reads for a token",
        "rows[].bytes_per_token": "bytes read for a token",
        "rows[].tokens_per_s": "tokens per second, modelled for the device",
        "rows[].token_ids": "the text",
        "tokens_equal": "whether all group sizes give the same text",
    }
    needs_data = True
    over = {"layers_per_group": "groups"}
    full_minutes = 2.5

    def measure(self, cell: Cell) -> Iterator[Row]:
        """One row."""
        options, size = self.options, cell["layers_per_group"]
        config: dict[str, Any] = settings(options.model, options.device, options.short) | CHOSEN
        config |= {"dram_budget": options.dram_budget, "layers_per_group": size, "label": f"of-{size}"}
        top = build(self.folder, "--until", "package", **config)
        with Session(artifact_in(top), modelled=True) as session:
            found = session.generate(TextCodec(session.artifact).encode(PROMPT), max_new_tokens=options.tokens)
        metrics = found.metrics
        yield {
            "reads_per_token": metrics.reads / metrics.num_tokens,
            "bytes_per_token": metrics.read_bytes / metrics.num_tokens,
            "tokens_per_s": metrics.modelled_tokens_per_s,
            "token_ids": list(found.token_ids),
        }

    def figures(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """Whether the texts are one."""
        return {"tokens_equal": all(row["token_ids"] == rows[0]["token_ids"] for row in rows)}

    def tables(self, rows: Sequence[Row], figures: Mapping[str, Any]) -> Iterator[Table]:
        """All but the text."""
        columns = [name for name in rows[0] if name != "token_ids"]
        yield Table(f"layer groups, {self.options.model}", columns, [[row[name] for name in columns] for row in rows])


if __name__ == "__main__":
    main("groups")
