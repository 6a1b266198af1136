"""Prints a quote for people: a table of figures, and their bases if asked for; one of budgets, or one of devices."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from coldpress.compiler.quote.records import DeviceQuote, Estimate, Quote
from coldpress.runtime.quantities import show_bytes, show_number
from coldpress.runtime.quantization._mixed import in_words
from coldpress.schemas.errors import printable

WORDS = {
    "tokens_per_s": "tokens/s",
    "token_flash_bytes": "read per token",
    "token_reads": "reads per token",
    "hit_rate": "hit rate",
    "flash_share": "share of flash",
    "first_token_s": "first token, cold",
    "ppl_ratio": "perplexity ratio",
    "least_dram_bytes": "least DRAM",
    "recommended_dram_bytes": "recommended DRAM",
    "disk_bytes": "disk of the build",
    "download_bytes": "download",
    "build_s": "build time",
    "written_bytes": "wear: bytes written",
    "token_energy_j": "energy per token",
    "drafted_tokens_per_s": "tokens/s with drafts",
}
SHARES = ("hit_rate", "flash_share")
UNKNOWN = "unknown"
"""Begins the basis of a figure that nobody knows."""


def show(quote: Quote, console: Console, *, why: bool = False) -> None:
    """Prints all devices; one device with every figure, its basis if `why`, and the command that verifies it."""
    console.print(f"{printable(quote.model)}: {printable(quote.basis_in_words)}")
    limit = "" if quote.max_ppl_ratio is None else f"perplexity at most {quote.max_ppl_ratio:g} times the source's, "
    console.print(f"{limit}{quote.context_length} tokens of context, {quote.prompt_tokens} of them a prompt\n")
    if len(quote.devices) == 1:
        _one(quote.devices[0], console, why)
    elif len({one.device for one in quote.devices}) == 1:
        _budgets(quote.devices, console)
    else:
        _several(quote.devices, console)


def _one(quote: DeviceQuote, console: Console, why: bool) -> None:
    _headline(quote, console)
    table = _table("figure", "value")
    for name, figure in quote.figures.items():
        table.add_row(WORDS[name], _with_interval(name, figure))
    console.print(table)
    if why:
        console.print()
        for name, figure in quote.figures.items():
            console.print(f"{WORDS[name]}: {printable(figure.basis)}")
    if (more := quote.next_budget) is not None:
        gain = "it fits" if more.ratio == 0 else f"{more.ratio:.2g} x"
        added = show_bytes(more.dram_budget_bytes - quote.dram_budget_bytes)
        console.print(
            f"\n+{added} of DRAM -> {gain} ({shown('tokens_per_s', more.tokens_per_s)} tokens/s, {more.method})"
        )
    skipped: dict[str, list[str]] = {}
    for one in quote.tried:
        if one.skipped is not None:
            skipped.setdefault(one.skipped, []).append(one.method)
    for reason, methods in skipped.items():
        console.print(f"not {', '.join(methods)}: {printable(reason)}")
    _commands([quote], console)


def _budgets(quotes: Sequence[DeviceQuote], console: Console) -> None:
    for quote in quotes:
        _headline(quote, console)
    table = _table("figure", *(show_bytes(quote.dram_budget_bytes) for quote in quotes))
    for name in quotes[0].figures:
        table.add_row(WORDS[name], *(_with_interval(name, quote.figures[name]) for quote in quotes))
    console.print(table)
    _commands(quotes, console)


def _headline(quote: DeviceQuote, console: Console) -> None:
    budget = show_bytes(quote.dram_budget_bytes)
    if quote.refusal is not None:
        console.print(f"{quote.device} with {budget} of DRAM: no build: {printable(quote.refusal)}\n")
    if quote.choice is not None:
        one = quote.choice
        console.print(
            f"{quote.device} with {budget} of DRAM: {one.method}, {in_words(one.beside(one.format))}, "
            f"keys and values in {one.kv_cache}, cache {one.cache}, density {one.density:.2f}: "
            f"{printable(one.reason)}; bound by {quote.bound}\n"
        )


def _commands(quotes: Sequence[DeviceQuote], console: Console) -> None:
    figures = (figure for quote in quotes for figure in quote.figures.values())
    commands = dict.fromkeys(figure.verify for figure in figures if figure.verify)
    if commands:
        console.print("\nverify with")
    for command in commands:
        console.print(f"  {printable(command)}", soft_wrap=True)


def _several(quotes: tuple[DeviceQuote, ...], console: Console) -> None:
    table = _table("device", "DRAM", "least", "tokens/s", "interval", "by", "choice")
    for quote in quotes:
        speed, one = quote.figures.get("tokens_per_s"), quote.choice
        table.add_row(
            quote.device,
            show_bytes(quote.dram_budget_bytes),
            shown("least_dram_bytes", quote.figures["least_dram_bytes"].value),
            _value("tokens_per_s", speed) if speed else "does not fit",
            _interval("tokens_per_s", speed) if speed else "",
            quote.bound or "",
            f"{one.method} {one.density:.2f} {in_words(one.beside(one.format))} {one.cache}" if one else "",
        )
    console.print(table)


def shown(name: str, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if name.endswith("_bytes"):
        return show_bytes(value)
    if name.endswith("_s") and not name.endswith("tokens_per_s"):
        return f"{show_number(value, 3)} s" if value < 3600 else f"{value / 3600:.1f} h"
    return f"{value:.1%}" if name in SHARES else show_number(value, 4)


def _value(name: str, figure: Estimate) -> str:
    return f"at most {shown(name, figure.value)}" if figure.is_most else shown(name, figure.value)


def _with_interval(name: str, figure: Estimate) -> str:
    if figure.value is None and figure.basis.startswith(UNKNOWN):
        return printable(figure.basis)
    value, interval = _value(name, figure), _interval(name, figure)
    return f"{value} ({interval})" if interval else value


def _interval(name: str, figure: Estimate) -> str:
    if figure.low is None or figure.high is None:
        return ""
    return f"{shown(name, figure.low)} to {shown(name, figure.high)}"


def _table(*columns: str) -> Table:
    folded = (Column(name, overflow="fold") for name in columns)
    return Table(*folded, box=None, pad_edge=False, header_style="bold")
