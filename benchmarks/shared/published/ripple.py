"""Ripple: Table 1, the bandwidths of Figures 4 and 16, and read lengths before ordering (Figure 12).

Table 1 names neither the phone nor the precision; ours is OnePlus 12 with 16 bits. The rate of computing comes from OPT
6.7B's row; the others follow from it.
"""

from collections.abc import Iterator

import numpy as np

from benchmarks.shared.papers.chunks import chunk_bytes_per_s
from benchmarks.shared.papers.ripple import expected_reads, load_ratio, load_seconds
from benchmarks.shared.published.cells import (
    LLAMA_2_7B,
    MISTRAL_7B,
    OPT_1_3B,
    OPT_6_7B,
    OPT_350M,
    Cell,
    computing_at,
)
from coldpress.compiler.cost_model import weight_bytes
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.store.computing import weight_seconds

TABLE_1 = {
    "OPT-350M": (OPT_350M, 34, 87, 0.719),
    "OPT-1.3B": (OPT_1_3B, 84, 273, 0.765),
    "OPT-6.7B": (OPT_6_7B, 387, 1883, 0.829),
    "Llama2-7B": (LLAMA_2_7B, 450, 10982, 0.961),
    "Mistral-7B": (MISTRAL_7B, 355, 15126, 0.977),
}
"""Model -> (its shape, milliseconds of computing and of loading half of it, share of loading)."""
FITTED = "OPT-6.7B"
LARGE_READ = 1 << 20
ACTIVE = {"OPT-6.7B": (0.0328, 1.05), "Llama2-7B": (0.1388, 1.10)}
"""Model -> (share of active neurons (Table 3), mean length of a read in neurons before ordering (6.4))."""
FAULTS = "llama.cpp maps the file: 0.5 to 0.6 GB/s is the rate of one page at a time, ours reads many at once"
SMALL_MATRICES = "small matrices take longer per byte"
ABOVE = "3.5 to 4.8 GB/s are reached, below the 5.8 GB/s of large reads"


def cells() -> Iterator[Cell]:
    """Yields all cells."""
    yield from _table_1()
    phone, older = load_device("oneplus12").flash, load_device("oneplus-ace2").flash
    for size in (8192, 24576):
        ours = chunk_bytes_per_s(phone, size) / chunk_bytes_per_s(phone, 4096)
        name = f"bandwidth of {size >> 10} KB reads over 4 KB"
        yield Cell("Fig. 4", name, "ratio", size / 4096, ours, "profile: linear below 24 KB")
    ours = chunk_bytes_per_s(older, 8192) / chunk_bytes_per_s(phone, 8192)
    yield Cell("Fig. 16", "OnePlus Ace 2 over OnePlus 12", "ratio", 0.5, ours, "profiles, reads of 8 KB")
    for name, (share, published) in ACTIVE.items():
        used = np.random.default_rng(0).random((256, 8192)) < share
        ours = float(np.mean(used.sum(axis=1))) / expected_reads(used)
        name, basis = f"{name}: neurons of a read, unordered", "Eq. 5, neurons used independently (Table 3's share)"
        yield Cell("Fig. 12", name, "neurons", published, ours, basis, 0.06)


def _table_1() -> Iterator[Cell]:
    shape, fitted_ms, *_ = TABLE_1[FITTED]
    rate, of_row = 1e3 * weight_bytes(shape, "fp16") / fitted_ms, f"the rate of {FITTED}'s row"
    device = computing_at("oneplus12", "fp16", rate, f"Ripple, Table 1, {FITTED}")
    for name, (model, compute_ms, load_ms, ratio) in TABLE_1.items():
        size = weight_bytes(model, "fp16")
        note = FAULTS if load_ms > 1e4 else ABOVE
        if name != FITTED:
            ours = 1e3 * weight_seconds(device, "fp16", size)
            yield Cell("Table 1", f"{name}: compute", "ms", compute_ms, ours, of_row, 0.3, SMALL_MATRICES)
        loaded_s = load_seconds(device, size / 2, LARGE_READ)
        basis = "half of the weights in large reads"
        yield Cell("Table 1", f"{name}: load", "ms", load_ms, 1e3 * loaded_s, basis, note=note)
        ours, basis = load_ratio(device, "fp16", loaded_s, size), f"our load, {of_row}"
        yield Cell("Table 1", f"{name}: load ratio", "share", ratio, ours, basis, note=note)
