"""Memory of this machine and of this process."""

import ctypes
import os
import resource
import sys

from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import MANIFEST_FILE


def check_fits(plan: Plan, needed: int, available: int) -> None:
    """Refuses a plan whose parts do not fit its budget, or this machine.

    Args:
        plan: Its budget counts.
        needed: Bytes that its parts take.
        available: Bytes that there are.

    Raises:
        DoesNotFitError: saying which numbers.
    """
    if needed > plan.dram_budget_bytes:
        raise DoesNotFitError(
            f"{MANIFEST_FILE}: {plan.title} needs {needed} bytes of DRAM, its budget is "
            f"{plan.dram_budget_bytes}; take the plan from choose_plan"
        )
    if needed > available:
        raise DoesNotFitError(
            f"{MANIFEST_FILE}: {plan.title} needs {needed} bytes of DRAM, this machine has {available}; give a "
            "smaller --dram-budget"
        )


def give_back_heap() -> None:
    """Gives the pages back to the system that the C library's heap keeps of what was freed, where it can: glibc does so
    by itself with those at its end alone."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """The most memory this process has had resident: weights, tables, libraries and the interpreter."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux
