"""The papers' equations by hand, and their published tables where ours must be near."""

import numpy as np
import pytest

from benchmarks.shared.papers import llm_in_a_flash as windows
from benchmarks.shared.papers.activeflow import Parameters, Sizes, costs, greedy_search, serial_seconds
from benchmarks.shared.papers.chunks import chunk_bytes_per_s
from benchmarks.shared.papers.dip import Moved, dense, tokens_per_s
from benchmarks.shared.papers.llm_in_a_flash import latency
from benchmarks.shared.papers.ripple import expected_reads
from benchmarks.shared.published import activeflow, dip, llm_in_a_flash, ripple
from tests.support.devices import with_compute
from tests.support.statistics import device_of

SIZES = Sizes(
    num_layers=12,
    layer_bytes=10_000_000,
    model_bytes=120_000_000,
    kv_cache_bytes=1_000_000,
    channel_bytes=4096,
    format="int4_group32",
)
SMALL, LARGE, MEMORY = 0.5e9, 1e9, 10e9
"""Bytes per second of reads of 4 KiB, of 8 KiB and more, and of DRAM."""
FOUR_DIGITS = 1e-3
"""The fitted law of a device has four digits."""
PHONE = device_of(latency_s=0.0, dram_bytes_per_s=MEMORY, read_curve=((4096, SMALL), (8192, LARGE)))


def test_bandwidth_is_that_of_full_queues_of_one_size():
    assert chunk_bytes_per_s(PHONE.flash, 4096) == pytest.approx(SMALL, rel=FOUR_DIGITS)
    assert chunk_bytes_per_s(PHONE.flash, 2048) == pytest.approx(
        SMALL / 2, rel=FOUR_DIGITS
    )  # a page is read for half of it
    assert chunk_bytes_per_s(PHONE.flash, 65536) == pytest.approx(LARGE, rel=FOUR_DIGITS)


def test_activeflow_s_equations_by_hand():
    """Eqs. 1-9: 60 % sparse, groups of 2 of 12 layers, half of the active weights cached, 90 % guessed."""
    plan = Parameters(sparsity=0.6, layers_per_group=2, cache_bytes=5_000_000, hit_rate=0.5, similarity=0.9)
    found = costs(SIZES, plan, PHONE)
    assert found.group_bytes == pytest.approx(8e6)  # Eq. 9
    assert found.memory_bytes == pytest.approx(8e6 + 5e6 + 1e6)  # Eq. 8
    assert found.load_s == pytest.approx(4e6 / SMALL, rel=FOUR_DIGITS)  # Eq. 3
    assert found.compute_s == pytest.approx(8e6 / MEMORY)  # Eq. 4
    assert found.onload_s == pytest.approx(4e6 * 0.5 * 0.1 / SMALL, rel=FOUR_DIGITS)  # Eq. 6
    assert found.preload_s == pytest.approx(4e6 / LARGE, rel=FOUR_DIGITS)  # Eq. 7
    assert found.overlap_s == pytest.approx(0.0004 + 0.004, rel=FOUR_DIGITS)  # Eq. 5
    assert found.decode_s == pytest.approx(0.008 + 5 * 0.0044 + 0.0008, rel=FOUR_DIGITS)  # Eq. 1


def test_activeflow_computes_at_the_device_s_rate_where_it_is_known():
    device = with_compute(PHONE, (("int4_group32", 0.4, 2e9), ("int4_group32", 1.0, 4e9)))
    assert costs(SIZES, Parameters(0.6, 2, 0, 0.5, 0.9), device).compute_s == pytest.approx(8e6 / 2e9)


def test_a_serial_token_loads_and_computes_layer_by_layer():
    assert serial_seconds(SIZES, 0.6, 0.5, PHONE) == pytest.approx(12 * (2e6 / SMALL + 4e6 / MEMORY), rel=FOUR_DIGITS)


def test_the_greedy_search_ends_where_reads_become_no_faster():
    """sp = 1 - 48/120; reads of two channels have the full bandwidth, so that a third layer brings nothing."""
    plan, cost = greedy_search(SIZES, 48_000_000, PHONE, lambda _sparsity, _bytes: 0.5, 0.9)
    assert (plan.sparsity, plan.layers_per_group) == (pytest.approx(0.6), 2)
    assert plan.cache_bytes == pytest.approx(48_000_000 - 1_000_000 - 8_000_000, abs=1)
    assert cost.memory_bytes == pytest.approx(48_000_000, abs=1)  # Eq. 2


def test_the_greedy_search_ends_where_computing_takes_longer_than_preloading():
    slow = with_compute(PHONE, (("int4_group32", 1.0, 4e8),))
    plan, cost = greedy_search(SIZES, 48_000_000, slow, lambda _sparsity, _bytes: 0.5, 0.9)
    assert plan.layers_per_group == 1
    assert cost.preload_s <= cost.compute_s


def test_the_greedy_search_asks_for_the_hit_rate_of_the_cache_that_is_left():
    asked: list[tuple[float, int]] = []

    def hit_rate(sparsity: float, cache_bytes: int) -> float:
        asked.append((sparsity, cache_bytes))
        return 0.0

    greedy_search(SIZES, 6_000_000, PHONE, hit_rate, 0.9)
    assert asked[0] == (pytest.approx(0.95), pytest.approx(6_000_000 - 1_000_000 - 500_000, abs=1))
    assert all(cache_bytes >= 0 for _, cache_bytes in asked)


def test_latency_adds_io_memory_and_computing():
    device = with_compute(PHONE, (("fp16", 1.0, 2e9),), copy_bytes_per_s=1e9)
    found = latency(device, "fp16", 4e6, 8192, 8e6)
    assert (found.io_s, found.memory_s, found.compute_s) == pytest.approx((0.004, 0.004, 0.004))
    assert found.seconds == pytest.approx(0.012)


def test_what_a_window_holds_and_loads_by_hand():
    """Tokens use {0}, {0, 1}, {2}, {0}: unions of two are {0, 1}, {0, 1, 2}, {0, 2}."""
    used = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]], bool)
    assert windows.aggregated_use(used, 1) == pytest.approx(5 / 16)
    assert windows.aggregated_use(used, 2) == pytest.approx(7 / 12)
    assert windows.incremental_use(used, 1) == pytest.approx(7 / 12 - 5 / 16)


def test_dip_moves_bytes():
    """4 GB of 7.4 in DRAM: 3.4 from flash at 1 GB/s; a sum adds all bytes at DRAM's 60 GB/s."""
    device = dip.bytes_only()
    moved = dense(7.4e9, 1.4e9, 4e9)
    assert (moved.flash_bytes, moved.dram_bytes) == pytest.approx((3.4e9, 7.4e9))
    assert tokens_per_s(device, moved, "all") == pytest.approx(1 / 3.4, rel=FOUR_DIGITS)
    assert tokens_per_s(device, moved, "none") == pytest.approx(1 / (3.4 + 7.4 / 60), rel=FOUR_DIGITS)
    half = Moved(1.4e9, 6e9, density=0.5, hit_rate=0.9)
    assert (half.flash_bytes, half.dram_bytes) == pytest.approx((0.3e9, 4.4e9))


def test_neighbours_that_are_used_together_take_one_read():
    used = np.array([[1, 1, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0]], bool)
    assert expected_reads(used) == pytest.approx((2 + 2 + 0) / 3)


PAPERS = {"Ripple": ripple, "LLM in a flash": llm_in_a_flash, "ActiveFlow": activeflow, "DIP": dip}


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_a_cell_that_is_off_says_why(paper):
    found = list(PAPERS[paper].cells())
    assert found
    assert [(one.table, one.cell, one.ratio) for one in found if not one.within and not one.note] == []


@pytest.mark.slow
def test_llm_in_a_flash_s_tables_follow_from_its_naive_rows():
    """Computing and memory management of Table 3 within 30 %, I/O of Table 2 within 10 %."""
    found = {(one.table, one.cell): one.ratio for one in llm_in_a_flash.cells()}
    computing = [ratio for (_, cell), ratio in found.items() if "CPU: compute" in cell or ": memory" in cell]
    reading = [ratio for (table, cell), ratio in found.items() if table == "Table 2" and "I/O" in cell]
    assert (len(computing), len(reading)) == (8, 5)
    assert computing == pytest.approx([1.0] * 8, abs=0.3)
    assert reading == pytest.approx([1.0] * 5, abs=0.1)


def test_activeflow_s_groups_gain_at_the_size_of_a_7b():
    """From one layer to four, the gain over a serial token goes from nothing to 2.8."""
    found = [one.ours for one in activeflow.cells() if one.table == "Fig. 16"]
    assert found == pytest.approx([0.96, 2.84], abs=0.03)


def test_dip_s_dense_rows_and_dip_ca_follow_from_sizes_and_hit_rates():
    found = list(dip.cells())
    plain = [one.ratio for one in found if one.cell.startswith("dense")]
    aware = [one.ratio for one in found if one.cell.startswith("DIP-CA")]
    assert (len(plain), len(aware)) == (10, 4)
    assert plain == pytest.approx([1.0] * 10, abs=0.05)
    assert aware == pytest.approx([1.0] * 4, abs=0.15)
