"""Divides DRAM by use: the budget's parts, and the process beside it, as bars."""

from dataclasses import dataclass

from coldpress.schemas.metrics import Metrics

NUM_COLOURS = 6
BUDGET, PROCESS, UNUSED = "the budget", "the process itself", "unused"
USES = (
    *("embeddings and head", "other resident weights", "coarse planes", "predictors", "pinned units", "cached units"),
    *("KV cache", "read buffer", "preload buffer", "bookkeeping", UNUSED),
)
"""In this order, with a colour each, so that bars of several builds can be compared."""


@dataclass(frozen=True)
class Part:
    name: str
    num_bytes: int
    share: float
    """Share of the bar."""
    colour: str
    """A CSS colour."""


@dataclass(frozen=True)
class DramBars:
    budget: tuple[Part, ...]
    process: tuple[Part, ...]
    """The budget as one part, and what the process takes beside it."""

    @classmethod
    def of(cls, metrics: Metrics) -> "DramBars":
        own = {BUDGET: metrics.budget_bytes, PROCESS: metrics.process_bytes}
        return cls(_bar(metrics.dram_parts, USES), _bar(own, (BUDGET, PROCESS)))

    @property
    def process_bytes(self) -> int:
        return sum(part.num_bytes for part in self.process)


def _bar(sizes: dict[str, int], uses: tuple[str, ...]) -> tuple[Part, ...]:
    total = sum(sizes.values())
    return tuple(
        Part(name, sizes[name], sizes[name] / total, "var(--grid)" if name == UNUSED else colour_of(number))
        for number, name in enumerate(uses)
        if name in sizes
    )


def colour_of(number: int) -> str:
    """Returns a colour for each number: the series, then the same, mixed with the ground."""
    series = f"var(--series-{number % NUM_COLOURS + 1})"
    return series if number < NUM_COLOURS else f"color-mix(in srgb, {series} 50%, var(--card))"
