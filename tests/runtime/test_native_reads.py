"""Batched reads: every extent lands where it belongs, every page is checked, every failure is found and told."""

import os
import re
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from coldpress.runtime import _native

PAGE = 4096
PAGES = 400


@pytest.fixture(scope="module")
def data() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, PAGES * PAGE, np.uint8)


@pytest.fixture(params=["start_reads", "start_ring_reads"])
def start(request):
    if request.param == "start_ring_reads" and _native.ring_error():
        pytest.skip(f"the kernel refuses io_uring ({os.strerror(_native.ring_error())})")
    return getattr(_native, request.param)


@pytest.fixture
def image(tmp_path, data) -> Path:
    path = tmp_path / "flash.img"
    path.write_bytes(data.tobytes())
    return path


@pytest.fixture(params=["direct", "cached"])
def fd(request, image):
    flags = os.O_RDONLY | (os.O_DIRECT if request.param == "direct" else 0)
    try:
        number = os.open(image, flags)
    except OSError:
        pytest.skip("the file system of the temporary folder has no direct reads")
    yield number
    os.close(number)


@pytest.fixture(scope="module")
def checksums(data) -> np.ndarray:
    return _native.crc32c_pages(data, PAGE)


def u64(values) -> np.ndarray:
    return np.array(values, np.uint64)


def read(start, fd, extents, buffer, checksums, threads=8, page_bytes=PAGE) -> int:
    """extents: (first page, number of pages), packed into the buffer one after another."""
    lengths = [count * page_bytes for _, count in extents]
    into = np.cumsum([0, *lengths[:-1]]) if lengths else []
    offsets = [first * page_bytes for first, _ in extents]
    return start(fd, u64(offsets), u64(lengths), buffer, u64(into), page_bytes, checksums, threads).finish()


def pages_of(data, extents) -> np.ndarray:
    return np.concatenate([data[first * PAGE : (first + count) * PAGE] for first, count in extents])


SCATTERED = [(7, 1), (0, 3), (399, 1), (100, 290), (50, 0), (8, 2)]


@pytest.mark.parametrize("threads", [1, 2, 32])
def test_extents_land_where_they_belong(start, fd, data, checksums, threads):
    wanted = pages_of(data, SCATTERED)
    buffer = _native.aligned_buffer(wanted.size + PAGE)
    assert read(start, fd, SCATTERED, buffer, checksums, threads) == -1
    assert np.array_equal(buffer[:-PAGE], wanted)
    assert not buffer[-PAGE:].any()


def test_larger_pages(start, fd, data):
    buffer = _native.aligned_buffer(data.size // 2)
    sums = _native.crc32c_pages(data, 4 * PAGE)
    assert read(start, fd, [(50, 50)], buffer, sums, page_bytes=4 * PAGE) == -1
    assert np.array_equal(buffer, data[data.size // 2 :])


def test_nothing_to_read(start, fd, checksums):
    assert read(start, fd, [], _native.aligned_buffer(0), checksums) == -1


@pytest.mark.parametrize("bad", [0, 7, 101, 389, 399])
@pytest.mark.parametrize("threads", [1, 8])
def test_a_flipped_bit_is_found_at_its_page(start, image, data, checksums, bad, threads):
    with image.open("r+b") as file:
        file.seek(bad * PAGE + 1234)
        file.write(bytes([data[bad * PAGE + 1234] ^ 4]))
    buffer = _native.aligned_buffer(pages_of(data, SCATTERED).size)
    with image.open("rb") as file:
        assert read(start, file.fileno(), SCATTERED, buffer, checksums, threads) == bad


def test_every_page_of_a_long_read_is_checked(start, image, data, checksums):
    """Checksums are taken of several pages at a time, and long reads are cut in pieces, of which none is left out."""
    buffer = _native.aligned_buffer(300 * PAGE)
    with image.open("rb") as file:
        for bad in range(50, 350):
            sums = checksums.copy()
            sums[bad] ^= 1
            assert read(start, file.fileno(), [(50, 300)], buffer, sums, threads=1) == bad


def test_of_several_bad_pages_the_first_is_told(start, fd, data, checksums):
    sums = checksums.copy()
    sums[[350, 120, 399, 8]] ^= 1
    buffer = _native.aligned_buffer(pages_of(data, SCATTERED).size)
    assert {read(start, fd, SCATTERED, buffer, sums, threads) for threads in (1, 3, 8, 8, 8)} == {8}


def test_pages_that_are_not_read_are_not_checked(start, fd, data, checksums):
    sums = checksums.copy()
    sums[20] ^= 1
    buffer = _native.aligned_buffer(pages_of(data, SCATTERED).size)
    assert read(start, fd, SCATTERED, buffer, sums) == -1


@pytest.mark.parametrize(("size", "missing"), [(PAGES * PAGE - 100, 100), (390 * PAGE, PAGE), (10, PAGE - 10)])
def test_a_truncated_file_is_an_error(start, image, fd, checksums, size, missing):
    os.truncate(image, size)
    page = min(size // PAGE, PAGES - 1)
    buffer = _native.aligned_buffer(PAGES * PAGE)
    message = rf"Errno 5.*truncated: {missing} bytes are missing in the read at byte {page * PAGE}"
    with pytest.raises(OSError, match=message):
        read(start, fd, [(page, 1)], buffer, checksums)


def test_of_several_failures_the_first_is_told(start, image, fd, checksums):
    os.truncate(image, 30 * PAGE)
    buffer = _native.aligned_buffer(PAGES * PAGE)
    with pytest.raises(OSError, match=rf"in the read at byte {35 * PAGE}$"):
        read(start, fd, [(90, 1), (35, 2), (2, 1), (60, 3)], buffer, checksums)


def test_a_closed_file_is_an_error(start, checksums):
    with pytest.raises(OSError, match=r"Errno 9") as caught:
        read(start, 987654, [(0, 1)], _native.aligned_buffer(PAGE), checksums)
    assert caught.value.errno == 9


BAD_EXTENTS = [
    ((100, PAGE, 0), r"extent 1 \(offset 100, length 4096, buffer offset 0\) is not made of whole pages of 4096 bytes"),
    ((0, 100, 0), r"is not made of whole pages"),
    ((PAGES * PAGE, PAGE, 0), r"ends behind the 400 pages with a checksum"),
    ((0, (PAGES + 1) * PAGE, 0), r"ends behind the 400 pages"),
    ((2**64 - PAGE, 2 * PAGE, 0), r"ends behind the 400 pages"),
    ((0, PAGE, 4 * PAGE - 1), r"does not fit into the buffer of 16384 bytes"),
    ((0, 5 * PAGE, 0), r"does not fit into the buffer"),
    ((0, PAGE, 2**64 - PAGE), r"does not fit into the buffer"),
]


@pytest.mark.parametrize(("extent", "message"), BAD_EXTENTS)
def test_bad_extents_are_refused_before_any_read(start, fd, checksums, extent, message):
    offset, length, into = extent
    buffer = _native.aligned_buffer(4 * PAGE)
    columns = u64([0, offset]), u64([PAGE, length]), buffer, u64([0, into])
    with pytest.raises(ValueError, match=message):
        start(fd, *columns, PAGE, checksums, 2)
    assert not buffer.any()


def test_bad_shapes_are_refused(start, fd, checksums):
    buffer = _native.aligned_buffer(PAGE)
    with pytest.raises(ValueError, match=r"lengths has 2 values, expected 1"):
        start(fd, u64([0]), u64([PAGE, PAGE]), buffer, u64([0]), PAGE, checksums, 1)
    with pytest.raises(ValueError, match=r"page_bytes is 0, expected a positive number"):
        start(fd, u64([0]), u64([0]), buffer, u64([0]), 0, checksums, 1)
    read_only = buffer.view()
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        start(fd, u64([0]), u64([PAGE]), read_only, u64([0]), PAGE, checksums, 1)


def test_waiting_tells_whether_what_was_waited_for_is_whole(start, fd, data, checksums):
    sums = checksums.copy()
    sums[100] ^= 1
    buffer = _native.aligned_buffer(6 * PAGE)
    offsets, lengths, into = (u64([PAGE * value for value in values]) for values in ((7, 100, 3), (2, 3, 1), (0, 2, 5)))
    reads = start(fd, offsets, lengths, buffer, into, PAGE, sums, 2)
    assert reads.wait(0)
    assert reads.wait(1)
    assert np.array_equal(buffer[: 2 * PAGE], data[7 * PAGE : 9 * PAGE])
    assert not reads.wait(2)
    assert not reads.wait(3)
    assert reads.wait(1)
    assert [reads.finish(), reads.finish()] == [100, 100]
    with pytest.raises(ValueError, match=r"4 extents are waited for, expected 0 to 3"):
        reads.wait(4)


def test_reads_that_nobody_waits_for_end_before_their_memory_goes(start, fd, data, checksums):
    for _ in range(50):
        buffer = _native.aligned_buffer(300 * PAGE)
        reads = start(fd, u64([50 * PAGE]), u64([300 * PAGE]), buffer, u64([0]), PAGE, checksums, 8)
        view = buffer[-PAGE:]
        del buffer, reads
        assert np.array_equal(view, data[349 * PAGE : 350 * PAGE])


def test_many_callers_at_once(start, fd, data, checksums):
    failures = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            extents = [(int(rng.integers(0, PAGES - 8)), int(rng.integers(0, 9))) for _ in range(20)]
            wanted = pages_of(data, extents)
            buffer = _native.aligned_buffer(wanted.size)
            if read(start, fd, extents, buffer, checksums, int(rng.integers(1, 9))) != -1 or not np.array_equal(
                buffer, wanted
            ):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("cpu", _native.cpus())
def test_known_checksums(cpu):
    before = _native.cpu()
    _native.use_cpu(cpu)
    try:
        known = {
            b"123456789": 0xE3069283,
            bytes(32): 0x8A9136AA,
            b"\xff" * 32: 0x62A8AB43,
            bytes(range(32)): 0x46DD794E,
        }
        for text, expected in known.items():
            assert _native.crc32c_pages(text, len(text)).tolist() == [expected]
            assert _native.crc32c_pages(text * 7, len(text)).tolist() == [expected] * 7
    finally:
        _native.use_cpu(before)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 5 * 4096 + 77])
def test_the_last_page_is_padded_with_zeros(data, size):
    padded = np.zeros(-(-size // PAGE) * PAGE, np.uint8)
    padded[:size] = data[:size]
    found = _native.crc32c_pages(data[:size], PAGE)
    assert found.dtype == np.uint32
    assert found.tolist() == _native.crc32c_pages(padded, PAGE).tolist()
    assert len(found) == -(-size // PAGE)


@pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20, (1 << 20) + 1])
def test_aligned_buffer(size):
    buffer = _native.aligned_buffer(size)
    assert (buffer.dtype, buffer.shape, buffer.ctypes.data % 65536) == (np.uint8, (size,), 0)
    assert not buffer.any()
    buffer[:] = 1


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="this kernel has no huge pages to ask for"
)
@pytest.mark.parametrize("size", [100_000, 572 << 10, 2 << 20, 5 << 20])
def test_a_buffer_asks_for_huge_pages_and_takes_no_more_than_its_bytes(size):
    """A device takes as many pieces per read as there are pages in memory: a third of the bandwidth on some."""
    start = (buffer := _native.aligned_buffer(size)).ctypes.data
    assert start % (2 << 20) == 0
    assert not buffer.any()
    buffer[:] = 1
    regions = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for region, flags in pairwise(regions):
        first, last = (int(place, 16) for place in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", region, re.MULTILINE)[-1])
        if first <= start < last:
            assert last >= start + size
            assert "hg" in flags.splitlines()[0].split()
            assert int(re.findall(r"^Rss: +(\d+) kB", region, re.MULTILINE)[-1]) == -(-size // 4096) * 4
            break
    else:
        pytest.fail("the buffer is nowhere in memory")


def test_aligned_buffer_outlives_its_views():
    view = _native.aligned_buffer(1 << 22)[5::7]
    view[:] = 3
    others = [_native.aligned_buffer(1 << 22) for _ in range(4)]
    assert (view == 3).all()
    assert not any(other.any() for other in others)


def test_impossible_buffers_are_refused():
    with pytest.raises(ValueError, match=r"a buffer of -1 bytes is not possible"):
        _native.aligned_buffer(-1)


@pytest.mark.parametrize("unit_bytes", [100, 5000, 3 << 19])
def test_units_land_in_their_slots_as_their_pages_are_read(start, fd, data, checksums, unit_bytes):
    """Units of less than a page, over pages, and over more than one read of the system; the other slots are left."""
    extents = [(0, 3), (7, 1), (40, 5)] if unit_bytes < PAGE * 3 else [(1, 390), (395, 2)]
    lengths = np.array([count * PAGE for _, count in extents])
    into = np.cumsum(lengths) - lengths
    buffer = _native.aligned_buffer(int(lengths.sum()))
    offsets = [int(into[0]), int(into[0]) + 5000, int(into[-1])] if unit_bytes < PAGE else [17]
    offsets = [offset for offset in offsets if offset + unit_bytes <= buffer.size]
    assert offsets
    slots = np.arange(len(offsets), dtype=np.int32)[::-1] * 2
    rows = np.full((7, unit_bytes), 0xA5, np.uint8)
    read_offsets = u64([first * PAGE for first, _ in extents])
    landing = (np.array(offsets, np.int64), np.ascontiguousarray(slots), rows)
    reads = start(fd, read_offsets, u64(lengths), buffer, u64(into), PAGE, checksums, 8, landing)
    assert reads.finish() == -1
    whole = np.concatenate([data[first * PAGE : (first + count) * PAGE] for first, count in extents])
    for offset, slot in zip(offsets, slots.tolist(), strict=True):
        assert (rows[slot] == whole[offset : offset + unit_bytes]).all()
    untouched = np.setdiff1d(np.arange(7), slots)
    assert (rows[untouched] == 0xA5).all()


def test_units_of_a_bad_page_do_not_land(start, fd, checksums):
    wrong = checksums.copy()
    wrong[2] ^= 1
    rows = np.full((2, 64), 0xA5, np.uint8)
    landing = (np.array([0, PAGE], np.int64), np.array([0, 1], np.int32), rows)
    buffer = _native.aligned_buffer(2 * PAGE)
    reads = start(fd, u64([0, 2 * PAGE]), u64([PAGE, PAGE]), buffer, u64([0, PAGE]), PAGE, wrong, 8, landing)
    assert reads.finish() == 2
    assert (rows[1] == 0xA5).all()
    assert (rows[0] == buffer[:64]).all()


@pytest.mark.parametrize(
    ("offsets", "slots", "message"),
    [
        ([0, PAGE - 63], [0, 1], "unit 1 at byte 4033 is before another or outside the buffer of 4096"),
        ([64, 0], [0, 1], "unit 1 at byte 0 is before another"),
        ([-1, 0], [0, 1], "unit 0 at byte -1 is before another or outside"),
        ([0, 64], [0, 2], "slot 2 at index 1 is outside the store of 2 slots"),
        ([0, 64], [0], "slots has 1 values, expected 2"),
    ],
)
def test_units_that_cannot_land_are_refused(start, fd, checksums, offsets, slots, message):
    landing = (np.array(offsets, np.int64), np.array(slots, np.int32), np.zeros((2, 64), np.uint8))
    with pytest.raises(ValueError, match=re.escape(message)):
        start(fd, u64([0]), u64([PAGE]), _native.aligned_buffer(PAGE), u64([0]), PAGE, checksums, 8, landing)
