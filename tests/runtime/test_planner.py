"""Reads cover what was asked for, waste no more than they may, and fit the buffer."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coldpress.runtime.extents import span_bytes
from coldpress.runtime.store import planner

cases = st.fixed_dictionaries(
    {
        "section_offset": st.integers(0, 3).map(lambda count: count * 65536),
        "unit_bytes": st.integers(1, 20000),
        "num_layers": st.sampled_from([1, 1, 2, 4]),
        "layer": st.integers(0, 3),
        "page_bytes": st.sampled_from([512, 4096, 16384]),
        "gap_bytes": st.sampled_from([0, 1, 512, 4096, 10000, 65536]),
        "positions": st.sets(st.integers(0, 300), min_size=1).map(lambda found: np.array(sorted(found), np.int32)),
        "extra_pages": st.integers(0, 20),
    }
)


def plan_of(case):
    max_bytes = span_bytes(case["unit_bytes"], case["page_bytes"]) + case["extra_pages"] * case["page_bytes"]
    names = ("positions", "page_bytes", "gap_bytes")
    return planner.plan_reads(units_of(case), *(case[name] for name in names), max_bytes), max_bytes


def units_of(case):
    unit_bytes, layer = case["unit_bytes"], case["layer"] % case["num_layers"]
    offset_bytes = case["section_offset"] + layer * unit_bytes
    return planner.Strided(offset_bytes, unit_bytes, unit_bytes * case["num_layers"])


@settings(max_examples=300, deadline=None)
@given(cases)
def test_reads_cover_the_units_and_nothing_needless(case):
    plan, max_bytes = plan_of(case)
    extents, page = plan.extents, case["page_bytes"]
    starts = units_of(case).starts(case["positions"])
    stops, ends = starts + case["unit_bytes"], extents.offsets + extents.lengths

    # every unit lies inside the read that is said to hold it, at the place that is said
    assert (extents.offsets[plan.unit_extent] + plan.unit_offset == starts).all()
    assert (plan.unit_offset >= 0).all()
    assert (stops <= ends[plan.unit_extent]).all()
    assert (np.diff(plan.unit_extent) >= 0).all()
    # whole pages, no longer than allowed, ascending; overlapping by one page at most and only where a read was cut
    assert not (extents.offsets % page).any()
    assert not (extents.lengths % page).any()
    assert (extents.lengths <= max_bytes).all()
    assert (np.diff(extents.offsets) > 0).all()
    assert (extents.offsets[1:] - ends[:-1] >= -page).all()
    # every read begins in its first unit's page and ends in its last one's: nothing is read at the edges
    first = np.searchsorted(plan.unit_extent, np.arange(len(extents)), side="left")
    last = np.searchsorted(plan.unit_extent, np.arange(len(extents)), side="right") - 1
    assert (extents.offsets == starts[first] // page * page).all()
    assert (ends == -(-stops[last] // page) * page).all()
    # inside a read, no gap between the pages of neighbours is wider than allowed
    low, high = starts // page * page, -(-stops // page) * page
    same = plan.unit_extent[1:] == plan.unit_extent[:-1]
    assert (low[1:] - high[:-1])[same].max(initial=0) <= case["gap_bytes"]
    # two reads stay apart only for their gap or their length; one that is half as long as it may be or longer is cut
    # short where it shares no page with the next
    apart = ~same
    gap, joined = (low[1:] - high[:-1])[apart], (high[1:] - extents.offsets[plan.unit_extent[:-1]])[apart]
    cut_short = (gap >= 0) & (2 * extents.lengths[plan.unit_extent[:-1]][apart] >= max_bytes - 1)
    assert ((gap > case["gap_bytes"]) | (joined > max_bytes) | cut_short).all()
    # a page is read twice only where the second half of the read has no place between units that begin pages of
    # their own
    for number in np.flatnonzero(extents.offsets[1:] < ends[:-1]):
        inside = np.flatnonzero(plan.unit_extent == number)
        alone = low[inside[1:]] >= high[inside[:-1]]
        assert not (alone & (2 * (high[inside[:-1]] - extents.offsets[number]) >= max_bytes)).any()


@settings(max_examples=200, deadline=None)
@given(cases, st.integers(0, 10))
def test_batches_fit_the_buffer_and_keep_the_units(case, more):
    plan, max_bytes = plan_of(case)
    buffer_bytes = max_bytes + more * case["page_bytes"]
    starts = units_of(case).starts(case["positions"])
    units, offsets = 0, []
    for batch in planner.batches(plan, buffer_bytes):
        assert batch.first_unit == units
        assert 0 < batch.extents.num_bytes <= buffer_bytes
        in_file = np.concatenate(
            [
                np.arange(start, start + length)
                for start, length in zip(batch.extents.offsets, batch.extents.lengths, strict=True)
            ]
        )
        units += batch.buffer_offset.size
        assert (in_file[batch.buffer_offset] == starts[batch.first_unit : units]).all()
        offsets += batch.extents.offsets.tolist()
    assert units == starts.size
    assert offsets == plan.extents.offsets.tolist()


@settings(max_examples=200, deadline=None)
@given(cases, st.integers(0, 10), st.integers(1, 100_000))
def test_arrivals_are_units_whose_reads_were_made(case, more, least_bytes):
    plan, max_bytes = plan_of(case)
    size = case["unit_bytes"]
    for batch in planner.batches(plan, max_bytes + more * case["page_bytes"]):
        ends = np.cumsum(batch.extents.lengths).tolist()
        units, read_bytes = 0, 0
        for first, stop, count in planner.arrivals(batch, size, least_bytes):
            assert first == units
            assert stop > first
            assert all(offset + size <= ends[count - 1] for offset in batch.buffer_offset[first:stop])
            assert all(offset + size > ends[count - 1] for offset in batch.buffer_offset[stop:])
            assert ends[count - 1] >= min(read_bytes + least_bytes, ends[-1])
            units, read_bytes = stop, ends[count - 1]
        assert units == batch.buffer_offset.size


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases, st.integers(1, 300), st.integers(1, 8))
def test_the_sequential_pass_reads_each_unit_once_and_in_order(case, num_units, pages_per_read):
    units, page = units_of(case), case["page_bytes"]
    buffer_bytes = span_bytes(units.unit_bytes, page) + case["extra_pages"] * page
    assume(num_units * units.stride_bytes < 2_000_000)
    next_unit = 0
    for batch in planner.sequential_batches(units, num_units, page, buffer_bytes, pages_per_read * page):
        assert batch.first_unit == next_unit
        assert batch.extents.num_bytes <= buffer_bytes
        assert batch.extents.lengths.max() <= pages_per_read * page
        assert (batch.extents.offsets[1:] == (batch.extents.offsets + batch.extents.lengths)[:-1]).all()
        start = units.offset_bytes + next_unit * units.stride_bytes
        assert batch.extents.offsets[0] + batch.buffer_offset[0] == start
        assert (np.diff(batch.buffer_offset) == units.stride_bytes).all()
        assert batch.buffer_offset[-1] + units.unit_bytes <= batch.extents.num_bytes
        next_unit += batch.buffer_offset.size
    assert next_unit == num_units


def test_collapse_trades_bytes_for_reads():
    positions = np.array([0, 3, 6, 50], np.int32)
    apart = planner.plan_reads(planner.Strided(0, 4096, 4096), positions, 4096, 0, 1 << 20)
    joined = planner.plan_reads(planner.Strided(0, 4096, 4096), positions, 4096, 8192, 1 << 20)
    assert (len(apart.extents), apart.extents.num_bytes) == (4, 4 * 4096)
    assert (len(joined.extents), joined.extents.num_bytes) == (2, 8 * 4096)


def test_a_long_read_is_cut_where_no_page_is_read_twice():
    """Five units, each of a page and a half: the third begins a page of its own; the read may have five pages."""
    units = planner.Strided(0, 6144, 6144)
    plan = planner.plan_reads(units, np.arange(5), 4096, 0, 5 * 4096)
    ends = plan.extents.offsets + plan.extents.lengths
    assert plan.extents.offsets.tolist() == [0, 3 * 4096]
    assert ends.tolist() == [3 * 4096, 8 * 4096]
    assert plan.extents.num_bytes == 8 * 4096  # nine pages where the first read goes on into the third unit


def test_units_of_one_page_are_read_once():
    plan = planner.plan_reads(planner.Strided(65536, 100, 100), np.array([0, 7, 39], np.int32), 4096, 0, 1 << 20)
    assert plan.extents.offsets.tolist() == [65536]
    assert plan.extents.lengths.tolist() == [4096]
    assert plan.unit_offset.tolist() == [0, 700, 3900]


def test_a_read_limit_below_one_unit_is_refused():
    with pytest.raises(ValueError, match="one unit may need 12288"):
        planner.plan_reads(planner.Strided(0, 5000, 5000), np.array([0], np.int32), 4096, 0, 8192)


def test_no_positions_need_no_reads():
    plan = planner.plan_reads(planner.Strided(0, 100, 100), np.empty(0, np.int32), 4096, 0, 4096 * 2)
    assert len(plan.extents) == 0
    assert list(planner.batches(plan, 8192)) == []


@settings(max_examples=300, deadline=None)
@given(cases)
def test_what_reads_bring_are_the_units_whole_inside_one(case):
    plan, _ = plan_of(case)
    units, num_units = units_of(case), 301
    starts = units.starts(np.arange(num_units))
    low, high = plan.extents.offsets, plan.extents.offsets + plan.extents.lengths
    inside = (starts[:, None] >= low) & (starts[:, None] + units.unit_bytes <= high)
    found = planner.brought(units, num_units, plan.extents)
    assert found.tolist() == np.flatnonzero(inside.any(axis=1)).tolist()
    assert set(case["positions"].tolist()) <= set(found.tolist())
    along = planner.inside(units, found, plan.extents)
    assert along.extents is plan.extents
    assert along.unit_extent.tolist() == inside[found].argmax(axis=1).tolist()  # of two reads the first
    assert (low[along.unit_extent] + along.unit_offset == starts[found]).all()
    assert set(along.unit_extent.tolist()) == set(range(len(plan.extents)))


def test_no_reads_bring_nothing():
    units = planner.Strided(65536, 100, 100)
    plan = planner.plan_reads(units, np.zeros(0, np.int32), 4096, 0, 8192)
    assert planner.brought(units, 50, plan.extents).size == 0
