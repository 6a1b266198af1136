"""A figure of hardware: a value that names its source."""

from typing import Generic, TypeVar

from pydantic import Field

from coldpress.schemas.base import Record

T = TypeVar("T")
SECONDS, BYTES_PER_S, SHARES = (0.0, 3600.0), (1.0, 1e15), (0.0, 1.0)
"""Least and largest values: wider than any device, and narrow enough that no sum of modelled seconds overflows."""


class Figure(Record, Generic[T]):
    """A value and its source: a paper's table, a measurement's command, or `assumption: <reason>`."""

    value: T
    source: str = Field(min_length=1)


def check_figure(name: str, figure: Figure[float], bounds: tuple[float, float]) -> Figure[float]:
    """Returns the figure, if it lies within `bounds`.

    Raises:
        ValueError: if it does not.
    """
    least, most = bounds
    if not least <= figure.value <= most:
        raise ValueError(f"{name} must be from {least:g} to {most:g}, found {figure.value:g}")
    return figure
