"""Draws charts as inline SVG in the page's colours, light or dark. The only stage that imports matplotlib.

Text stays text, and colours are CSS variables: matplotlib draws in placeholder colours that are replaced afterwards.
The result depends on its data alone: fixed id salt, no date, no creator.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from coldpress.schemas.metrics import Metrics

SERIES = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06")
INK, GRID = "#0a0b0a", "#0a0b0b"
VARIABLES = {colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, start=1)}
VARIABLES |= {INK: "var(--ink)", GRID: "var(--grid)"}
WIDTH, HEIGHT = 5.0, 3.2
"""Inches of 72 units: text of 10.5 units is readable on a phone, where a drawing has 300 pixels, and on a desk."""
CURVE_POINTS = 160
LEAST_AREA, MOST_AREA = 30, 360
"""Areas of marks in square points, for nothing and for the largest amount."""
LEGEND_AREA = 40
MANY = 30
"""Largest figure over the least from which a logarithmic axis has no room for numbers between powers of ten."""
STAR = 2.5
"""A star fills less of its area than other marks."""


Point = tuple[float, float | None, float]
"""(Figure across; figure up, or None for a line from the bottom to the top; amount that the mark's area shows)."""


@dataclass(frozen=True)
class Marks:
    name: str
    points: Sequence[Point]
    colour: str
    """One of SERIES."""
    shape: str
    """A marker of matplotlib."""
    joined: bool = False
    hollow: bool = False


def lines(label: str, series: Mapping[str, Mapping[int, float]], across: str = "layer", *, percent: bool = True) -> str:
    """Draws shares, or other figures, as lines over whole numbers: {name: {layer: share}}."""

    def draw(axes: Any) -> None:
        for colour, (name, values) in zip(cycle(SERIES), series.items(), strict=False):
            places = sorted(values)
            heights = [(100 if percent else 1) * values[place] for place in places]
            axes.plot(places, heights, color=colour, marker="o", markersize=3, linewidth=1.6, label=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(bottom=0, top=105 if percent and axes.get_ylim()[1] > 75 else None)

    return _svg(label, draw, across, f"{label}, %" if percent else label)


def stacked(
    label: str,
    series: Mapping[str, Sequence[float]],
    places: Sequence[int],
    across: str = "layer",
    percent: bool = True,
) -> str:
    """Draws stacked bars over whole numbers: {name: share or count at each place}."""

    def draw(axes: Any) -> None:
        below = np.zeros(len(places))
        for colour, (name, values) in zip(cycle(SERIES), series.items(), strict=False):
            heights = (100 if percent else 1) * np.asarray(values)
            axes.bar(places, heights, bottom=below, color=colour, width=0.7, label=name)
            below += heights
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 105 if percent else None)

    return _svg(label, draw, across, f"{label}, %" if percent else label)


def line(across: str, up: str, points: Mapping[float, float]) -> str:
    """Draws one line through points {x: y}; the vertical axis starts at zero."""

    def draw(axes: Any) -> None:
        places = sorted(points)
        axes.plot(places, [points[x] for x in places], color=SERIES[0], marker="o", markersize=3, linewidth=1.6)
        axes.set_ylim(bottom=0)

    return _svg(up, draw, across, up)


def marks(across: str, up: str, kinds: Sequence[Marks]) -> str:
    """Draws points by two figures, the one across logarithmic; their areas show a third. Later kinds cover earlier."""
    from matplotlib.ticker import LogLocator

    points = [point for kind in kinds for point in kind.points]
    largest = max(amount for _, _, amount in points)

    def draw(axes: Any) -> None:
        for order, kind in enumerate(kinds, start=3):
            colour, zorder = kind.colour, {"zorder": order}
            known = [point for point in kind.points if point[1] is not None]
            xs, ys = [x for x, _, _ in known], [y for _, y, _ in known]
            if kind.joined:
                axes.plot(xs, ys, color=colour, linewidth=1.2, **zorder)
            areas = [LEAST_AREA + (MOST_AREA - LEAST_AREA) * amount / largest for _, _, amount in known]
            sizes = [area * (STAR if kind.shape == "*" else 1) for area in areas]
            colours = {"facecolors": "none" if kind.hollow else colour, "edgecolors": colour}
            axes.scatter(xs, ys, sizes, marker=kind.shape, label=kind.name, alpha=0.85, **colours, **zorder)
            for x in (x for x, y, _ in kind.points if y is None):
                axes.axvline(x, color=colour, linestyle=":", linewidth=1.4)
        found = [x for x, _, _ in points]
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if max(found) / min(found) < MANY else (1.0,)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.margins(0.12)

    return _svg(up, draw, across, up, height=4.4)


def parts(across: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draws one bar for each row, from the top down, of parts that follow each other: (name, {part: size})."""
    names = list(dict.fromkeys(name for _, found in rows for name in found))

    def draw(axes: Any) -> None:
        begins = np.zeros(len(rows))
        for colour, name in zip(cycle(SERIES), names, strict=False):
            sizes = np.array([found.get(name, 0.0) for _, found in rows])
            axes.barh(range(len(rows)), sizes, left=begins, color=colour, height=0.6, label=name)
            begins += sizes
        for place, total in enumerate(begins):
            axes.annotate(f" {total:.3g}", (total, place), va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * float(begins.max()))

    return _svg(across, draw, across, height=1.3 + 0.42 * len(rows))


def side_by_side(across: str, up: str, places: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """Draws bars of several series beside each other at named places: {name: height at each place}."""
    width = 0.8 / len(series)

    def draw(axes: Any) -> None:
        for number, (colour, (name, heights)) in enumerate(zip(cycle(SERIES), series.items(), strict=False)):
            left = np.arange(len(places)) + (number - (len(series) - 1) / 2) * width
            axes.bar(left, heights, color=colour, width=width, label=name)
        axes.set_xticks(range(len(places)), places)
        axes.set_ylim(bottom=0)

    return _svg(up, draw, across, up)


def waterfall(across: str, bars: Sequence[tuple[str, float, float, bool]]) -> str:
    """Draws bars from the top down: (name, figure before the step, figure after it, whether the step is kept)."""
    labels = {
        (True, True): "faster",
        (False, True): "slower, but later steps need it",
        (False, False): "slower, left out",
    }
    colours = dict(zip(labels, (SERIES[0], SERIES[1], SERIES[5]), strict=True))

    def draw(axes: Any) -> None:
        labelled = set[str]()
        for place, (_, begin, end, kept) in enumerate(bars):
            kind = (end >= begin, kept)
            label = labels[kind] if labels[kind] not in labelled else None
            labelled.add(labels[kind])
            axes.barh(place, end - begin, left=begin, color=colours[kind], height=0.7, label=label)
            shown = f"{end:,.0f}" if end >= 100 else f"{end:.3g}"
            axes.annotate(f" {shown}", (max(begin, end), place), va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(max(begin, end) for _, begin, end, _ in bars))

    return _svg(across, draw, across, height=1.3 + 0.27 * len(bars))


def frequencies(label: str, curves: Mapping[str, np.ndarray]) -> str:
    """Draws activation frequency over rank, both logarithmic: a power law is a straight line (PowerInfer Fig. 5)."""

    def draw(axes: Any) -> None:
        for colour, (name, values) in zip(cycle(SERIES), curves.items(), strict=False):
            ranks = np.unique(np.geomspace(1, values.size, CURVE_POINTS).astype(int))
            kept = ranks[values[ranks - 1] > 0]
            axes.plot(100 * kept / values.size, 100 * values[kept - 1], color=colour, linewidth=1.6, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")

    return _svg(label, draw, "units, most active first, %", f"{label}, %")


def _svg(label: str, draw: Callable[[Any], None], across: str, up: str = "", height: float = HEIGHT) -> str:
    """Draws on new axes with two labels and returns an <svg> element; `label` is its accessible name."""
    import matplotlib
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": label,
        "font.family": "sans-serif",
        "font.size": 10.5,
        "grid.linewidth": 0.6,
        "legend.fontsize": 9.5,
        "legend.columnspacing": 1.2,
        "legend.handletextpad": 0.5,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
        **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        if axes.get_legend_handles_labels()[1]:
            for handle in figure.legend(loc="outside upper left", ncols=2).legend_handles:
                if isinstance(handle, PathCollection):
                    handle.set_sizes([LEGEND_AREA])
        stream = io.StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=empty)
    return _clean(stream.getvalue(), label)


def _clean(svg: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)  # the page's font applies
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)  # would apply to the page
    box = re.search(r'viewBox="[^"]*"', svg)
    opening = f'<svg class="chart" role="img" aria-label="{label}" {box[0] if box else ""}>'
    return opening + svg[svg.index(">") + 1 :]


@dataclass(frozen=True)
class Chart:
    """A figure of the page, whatever it shows."""

    title: str
    svg: str
    caption: str
    legend: tuple[tuple[str, str], ...] = ()
    """(name in the drawing, sentence that explains it)."""


UNUSED = "unused"
USES = (
    *("embeddings and head", "other resident weights", "predictors", "pinned units", "cached units"),
    *("KV cache", "read buffer", "preload buffer", "bookkeeping", UNUSED),
)
"""In this order, with a colour each, so that bars of several builds can be compared."""


@dataclass(frozen=True)
class BarPart:
    name: str
    num_bytes: int
    share: float
    colour: str


def dram_bars(metrics: Metrics) -> dict[str, list[BarPart]]:
    """Returns two bars: the `budget` by its uses; and the `process`, of the budget and what it takes beside it."""
    whole = {"the budget": metrics.budget_bytes, "the process itself": metrics.process_bytes}
    return {"budget": _bar(metrics.dram_parts, USES), "process": _bar(whole, tuple(whole))}


def _bar(sizes: dict[str, int], uses: tuple[str, ...]) -> list[BarPart]:
    found, total = list[BarPart](), sum(sizes.values())
    for number, name in enumerate(uses):
        series = f"var(--series-{number % len(SERIES) + 1})"
        mixed = f"color-mix(in srgb, {series} 50%, var(--card))"  # with the ground, where all series are in use
        colour = "var(--grid)" if name == UNUSED else series if number < len(SERIES) else mixed
        if name in sizes:
            found.append(BarPart(name, sizes[name], sizes[name] / total, colour))
    return found
