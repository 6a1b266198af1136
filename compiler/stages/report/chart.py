"""A figure of the page, whatever it shows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    caption: str
    legend: tuple[tuple[str, str], ...] = ()
    """(name in the drawing, sentence that explains it)."""
