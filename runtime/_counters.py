"""What a store counts while it runs."""

from dataclasses import dataclass


@dataclass
class Counters:
    """What was read and why; `hits` to `flash_s` over `fetch`, the rest over `stream` and opening."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    reads: int = 0
    read_bytes: int = 0
    used_bytes: int = 0
    active_bytes: int = 0
    kept_bytes: int = 0
    flash_s: float = 0.0
    modelled_flash_s: float = 0.0
    modelled_fetch_s: float = 0.0
    prefill_reads: int = 0
    prefill_read_bytes: int = 0
    prefill_flash_s: float = 0.0
    load_reads: int = 0
    load_read_bytes: int = 0
