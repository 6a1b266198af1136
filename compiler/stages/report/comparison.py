"""Compares an artifact with its alternatives: the search's front, a dense run in the same DRAM, the whole model in
DRAM. Everything here comes from metrics.json, so that two builds can be shown on one page."""

from collections.abc import Iterator, Mapping, Sequence

from coldpress.compiler.block_statistics import with_error
from coldpress.compiler.headline import rate
from coldpress.compiler.stages.report import charts
from coldpress.compiler.stages.report.charts import SERIES, Chart, Marks, Point
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.quantization._mixed import in_words
from coldpress.schemas.metrics import Metrics, WholeInDram
from coldpress.schemas.sparsity import Tried

COLUMNS = ("DRAM", "flash per token", "reads per token", "tokens/s, simulated", "perplexity")
"""Columns of the table that answers whether the artifact pays."""
FRONT_COLUMNS = (
    *("format", "cache", "KV cache", "density", "DRAM"),
    *("tokens/s, estimated", "perplexity over the source's"),
)
"""Columns of the table of the front, behind the selectors."""


def compared(metrics: Metrics) -> Iterator[tuple[str, ...]]:
    """Yields rows for this artifact, a dense build in the same DRAM, the whole model there, and llama.cpp."""
    yield (
        f"this artifact, {metrics.method}",
        show_bytes(metrics.budget_bytes),
        show_bytes(metrics.flash_bytes_per_token),
        f"{metrics.reads_per_token:.1f}",
        rate(metrics.modelled_tokens_per_s),
        with_error(metrics.ppl_artifact, metrics.ppl_artifact_error, 2),
    )
    if metrics.dense is not None:
        yield (
            "a build with method=dense, same DRAM and format",
            show_bytes(metrics.budget_bytes),
            show_bytes(metrics.dense.flash_bytes_per_token),
            str(metrics.dense.reads_per_token),
            rate(metrics.dense.tokens_per_s),
            f"{metrics.ppl_dense:.2f}",
        )
    for whole in metrics.in_dram:
        yield _whole_row(metrics, whole)
    for run in metrics.llama_cpp:
        name = f"llama.cpp {run.build}, {run.model_type}, {run.num_threads} threads, measured on {run.cpu}"
        speed = f"{with_error(run.tokens_per_s, run.tokens_per_s_deviation, 1)}, measured"
        yield (name, f"{show_bytes(run.model_bytes)} mapped", "not measured", "not measured", speed, "not measured")


def _whole_row(metrics: Metrics, whole: WholeInDram) -> tuple[str, ...]:
    original = whole is metrics.original
    name = f"the original, all in DRAM as {whole.format}" if original else f"{whole.title}, all in DRAM"
    needed = show_bytes(whole.dram_bytes) + ("" if whole.fits else ", more than the device has")
    speed = rate(whole.tokens_per_s) + ("" if whole.fits else ", if it fitted")
    return (name, needed, "0 B", "0.0", speed, _perplexity(metrics, whole, original))


def _perplexity(metrics: Metrics, whole: WholeInDram, original: bool) -> str:
    if original:
        return with_error(metrics.ppl_source, metrics.ppl_source_error, 2)
    if whole.ppl_ratio is None:
        return "not measured"
    if whole.is_estimate:
        return f"× {whole.ppl_ratio:.3f}, rounded to nearest"
    return f"{metrics.ppl_dense:.2f}"


def fitting_formats(metrics: Metrics) -> list[str]:
    """Returns the formats in which the whole model fits the artifact's own budget, each with its bytes."""
    return [
        f"{whole.title} ({show_bytes(whole.dram_bytes)})"
        for whole in metrics.in_dram
        if whole.dram_bytes <= metrics.budget_bytes
    ]


def front_rows(metrics: Metrics) -> list[tuple[str, ...]]:
    return [_front_row(found, metrics.tried[:1]) for found in metrics.front]


def _front_row(found: Tried, chosen: tuple[Tried, ...]) -> tuple[str, ...]:
    formats = found.beside(found.format) if found.format else ""
    left_out = {"reason"}  # said of the taken one alone
    is_chosen = found.model_dump(exclude=left_out) in [taken.model_dump(exclude=left_out) for taken in chosen]
    return (
        found.method + (", chosen" if is_chosen else ""),
        in_words(formats) if formats else "",
        found.cache or "",
        found.kv_cache or "",
        "" if found.density is None else f"{found.density:.2f}",
        "" if found.dram_bytes is None else show_bytes(found.dram_bytes),
        rate(1 / found.token_s) if found.token_s else "",
        "" if found.ppl_ratio is None else f"{found.ppl_ratio:.4f}",
    )


def front_chart(builds: Mapping[str, Metrics]) -> Chart:
    """Draws the front's speed and quality, the artifact, and its alternatives; several builds show their names."""
    first = next(iter(builds.values()))
    several = len(builds) > 1
    same_wholes = all(metrics.in_dram == first.in_dram for metrics in builds.values())
    kinds = list(_whole_marks(first)) if same_wholes else []
    for number, (name, metrics) in enumerate(builds.items()):
        colours = (SERIES[number],) * 3 if several else SERIES[:3]
        kinds += _own_marks(metrics, f", {name}" * several, colours)
    label = "perplexity over the original's, % more"
    caption = _front_caption(builds, first.in_dram if same_wholes else ())
    return Chart("Speed against quality", charts.marks("tokens/s, simulated", label, kinds), caption)


def _front_caption(builds: Mapping[str, Metrics], whole: tuple[WholeInDram, ...]) -> str:
    searched = any(metrics.front for metrics in builds.values())
    unknown = [each.title for each in whole if each.ppl_ratio is None]
    parts = [
        "Simulated speed and cost in quality: better is to the right and below. Areas show DRAM.",
        "The front's points are the search's estimates, from which it chose one; the artifact is measured on test text."
        if searched
        else "The method was given, so no search compared others; method=auto does.",
        f"Nobody measured the perplexity of {' and '.join(unknown)}: a dotted line for each." if unknown else "",
        "" if all(each.fits for each in whole) else "Hollow triangles do not fit the device.",
    ]
    return " ".join(filter(None, parts))


def _own_marks(metrics: Metrics, of: str, colours: Sequence[str]) -> Iterator[Marks]:
    of_front, of_this, of_dense = colours
    if metrics.dense is not None:
        run = _point(metrics.dense.tokens_per_s, metrics.ppl_dense / metrics.ppl_source, metrics.budget_bytes)
        yield Marks(f"dense, same DRAM{of}", [run], of_dense, "D")
    if known := _points(metrics.front):
        yield Marks(f"front{of}", known, of_front, "o", joined=True)
    if chosen := _points(metrics.tried[:1]):
        yield Marks(f"chosen{of}", chosen, of_front, "s", hollow=True)
    this = _point(metrics.modelled_tokens_per_s, metrics.ppl_ratio, metrics.budget_bytes)
    yield Marks(f"artifact{of}", [this], of_this, "*")


def _whole_marks(metrics: Metrics) -> Iterator[Marks]:
    for whole, colour, shape in zip(metrics.in_dram, SERIES[3:], ("^", "v", "<"), strict=True):
        point = _point(whole.tokens_per_s, whole.ppl_ratio, whole.dram_bytes)
        yield Marks(f"{whole.title} in DRAM", [point], colour, shape, hollow=not whole.fits)


def _points(found: Sequence[Tried]) -> list[Point]:
    known = (each for each in found if each.ppl_ratio is not None)
    return [_point(1 / each.token_s, each.ppl_ratio, each.dram_bytes or 0) for each in known if each.token_s]


def _point(tokens_per_s: float, ppl_ratio: float | None, dram_bytes: int) -> Point:
    return tokens_per_s, None if ppl_ratio is None else 100 * (ppl_ratio - 1), dram_bytes


def time_chart(builds: Mapping[str, Metrics]) -> Chart:
    """Draws where a token's time goes: flash, computing, and both at once."""
    rows: list[tuple[str, Mapping[str, float]]] = []
    for name, metrics in builds.items():
        of = f", {name}" * (len(builds) > 1)
        token_s = 1 / metrics.modelled_tokens_per_s
        rows.append((f"this artifact{of}", _overlapped(metrics.flash_s_per_token, metrics.dram_s_per_token, token_s)))
        if metrics.dense is not None:
            dense = metrics.dense
            rows.append((f"dense, same DRAM{of}", _overlapped(dense.flash_s, dense.dram_s, dense.token_s)))
    original = next(iter(builds.values())).original
    rows.append((f"{original.format}, all in DRAM", _overlapped(0.0, original.dram_s, original.dram_s)))
    caption = (
        "Modelled milliseconds of a token on the device. A request's reads and its computing overlap; what comes "
        "before and after requests does not."
    )
    return Chart("A token's time", charts.parts("ms per token", rows), caption)


def _overlapped(flash_s: float, dram_s: float, token_s: float) -> dict[str, float]:
    """Parts a token's milliseconds by what is busy; they sum to the token's time."""
    both = max(0.0, flash_s + dram_s - token_s)
    found = {"flash alone": flash_s - both, "flash and computing": both, "computing alone": dram_s - both}
    return {name: 1000 * max(0.0, seconds) for name, seconds in found.items()}


def reads_chart(metrics: Metrics, of: str = "") -> Chart | None:
    """Draws how long reads are; None for a run without reads. `of` begins the title."""
    if not metrics.read_lengths:
        return None
    reads, moved = (sum(getattr(each, name) for each in metrics.read_lengths) for name in ("reads", "read_bytes"))
    series = {
        "of the reads": [100 * each.reads / reads for each in metrics.read_lengths],
        "of the bytes": [100 * each.read_bytes / moved for each in metrics.read_lengths],
    }
    places = [f"{each.least_bytes / 1024:g}" for each in metrics.read_lengths]
    caption = (
        f"Reads of decoded tokens by their length, on average {show_bytes(moved / reads)}: each place holds those from "
        "its length to twice as much. Units that are used together and lie together share a read."
    )
    return Chart(f"{of}Read lengths", charts.side_by_side("length of a read, KiB", "share, %", places, series), caption)
