"""Names the plans of an artifact."""

from collections.abc import Sequence

DEFAULT = "default"
UNITS = ((10**9, "gb"), (10**6, "mb"), (10**3, "kb"), (1, "b"))
MAX_DIGITS = 9


def plan_names(budgets_bytes: Sequence[int]) -> list[str]:
    """Returns a name per DRAM budget: sizes such as `1.5gb`, with the digits that tell them apart."""
    if len(budgets_bytes) == 1:
        return [DEFAULT]
    names: list[str] = []
    for digits in range(1, MAX_DIGITS + 1):
        names = [_name(size, digits) for size in budgets_bytes]
        if len(set(names)) == len(names):
            break
    return names


def _name(size_bytes: int, digits: int) -> str:
    unit, word = next(unit for unit in UNITS if size_bytes >= unit[0])
    return f"{f'{size_bytes / unit:.{digits}f}'.rstrip('0').rstrip('.')}{word}"
