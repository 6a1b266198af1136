"""What a command may use while a device is emulated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Caps:
    """Rates of reads of one disk, and memory, page cache included."""

    device: str
    scale: float
    """Of the device's rates."""
    reads_per_s: int
    bytes_per_s: int
    memory_bytes: int
