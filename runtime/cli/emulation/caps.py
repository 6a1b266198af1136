"""The limits of an emulated command."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Caps:
    """Limits on the reads of one disk, and on memory, page cache included."""

    device: str
    scale: float
    """Share of the device's rates."""
    reads_per_s: int
    bytes_per_s: int
    memory_bytes: int
