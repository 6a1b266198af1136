"""Divides DRAM by use: the budget's parts, and the process beside it, as bars."""

from dataclasses import dataclass

from coldpress.schemas.metrics import Metrics

UNUSED = "unused"
NUM_COLOURS = 6


@dataclass(frozen=True)
class Part:
    """A piece of a bar."""

    name: str
    num_bytes: int
    share: float
    """Of the bar."""
    colour: str
    """A CSS colour."""


@dataclass(frozen=True)
class DramBars:
    """What the page shows of DRAM."""

    budget: tuple[Part, ...]
    process: tuple[Part, ...]
    """The budget as one part, and what the process takes beside it."""

    @classmethod
    def of(cls, metrics: Metrics) -> "DramBars":
        """Returns the bars of one build."""
        own = {"the budget": metrics.budget_bytes, "the process itself": metrics.process_bytes}
        return cls(_bar(metrics.dram_parts), _bar(own))

    @property
    def process_bytes(self) -> int:
        """Returns the bytes of budget and process together."""
        return sum(part.num_bytes for part in self.process)


def _bar(sizes: dict[str, int]) -> tuple[Part, ...]:
    total = sum(sizes.values())
    return tuple(
        Part(name, size, size / total, "var(--grid)" if name == UNUSED else colour_of(number))
        for number, (name, size) in enumerate(sizes.items())
    )


def colour_of(number: int) -> str:
    """Returns a colour for each number: the series, then the same, mixed with the ground."""
    series = f"var(--series-{number % NUM_COLOURS + 1})"
    return series if number < NUM_COLOURS else f"color-mix(in srgb, {series} 50%, var(--card))"
