"""Bandwidth of flash by the size of a read (Ripple 2.2, Figure 4; LLM in a flash 2.2; ActiveFlow Figure 7)."""

from coldpress.schemas.device import Flash, flash_seconds

WAVES = 64
"""Full queues of reads, so many that the first byte of the first ones does not count."""


def chunk_bytes_per_s(flash: Flash, chunk_bytes: int) -> float:
    """Returns the bytes of chunks per second, with the queue full of reads of one chunk each, in whole pages."""
    page_bytes, num_reads = flash.page_bytes.value, WAVES * flash.queue_depth.value
    read_bytes = -(-chunk_bytes // page_bytes) * page_bytes
    return num_reads * chunk_bytes / float(flash_seconds(flash, num_reads, num_reads * read_bytes))
