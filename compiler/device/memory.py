"""Asks the system how much memory is free."""

import psutil

from coldpress.runtime.dram.memory import memory_groups


def free_dram_bytes() -> int:
    """Returns the bytes of memory that this process may still take: the system's, or less by its control groups."""
    return min([psutil.virtual_memory().available, *(group.left_bytes for group in memory_groups())])
