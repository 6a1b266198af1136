"""Reads and prints amounts for people: memory as text, and tables of figures."""

import re
from collections.abc import Sequence

from coldpress.schemas.base import MAX_EXACT_INTEGER
from coldpress.schemas.errors import ColdpressError, clipped

UNITS = {
    **{"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}


def parse_bytes(text: int | str) -> int:
    """Returns the bytes of `3221225472`, `3GB` (10^9) or `1.5GiB` (2^30); case does not matter. Raises `ColdpressError`
    if the text is not such an amount, or not from 1 to 2^53 - 1 bytes."""
    text = str(text)
    match = re.fullmatch(r"\s*(\d{1,300}(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {name.upper(): size for name, size in UNITS.items()}
    unit = units.get((match[2] or "B").upper()) if match else None
    if re.fullmatch(r"\s*-\d.*", text):
        raise ColdpressError(f"'{clipped(text)}' is negative; give an amount of memory above 0")
    if match is None or unit is None:
        raise ColdpressError(
            f"'{clipped(text)}' is not an amount of memory; write bytes, or a number with {', '.join(UNITS)}"
        )
    exact = int(match[1]) * unit if match[1].isdigit() else float(match[1]) * unit
    found = int(min(exact, MAX_EXACT_INTEGER + 1))
    if found < 1:
        raise ColdpressError(f"'{clipped(text)}' is less than one byte; give a positive amount of memory")
    if found > MAX_EXACT_INTEGER:
        raise ColdpressError(f"'{clipped(text)}' is more than {MAX_EXACT_INTEGER} bytes; give what a machine may have")
    return found


def show_bytes(count: float) -> str:
    """Formats bytes as in `1.46 MB`: powers of ten, rounded to three digits, without zeros at the end."""
    rounded = float(f"{count:.2e}") if count >= UNITS["kB"] else round(count)
    for name in ("TB", "GB", "MB", "kB"):
        if rounded >= UNITS[name]:
            return f"{rounded / UNITS[name]:.12g} {name}"
    return f"{rounded} B"


def show_number(value: float, digits: int = 3) -> str:
    """Formats a number with at least so many digits, never as a power of ten if it is at least 0.0001."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Formats rows as lines of aligned columns; the first column is left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        indent
        + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
