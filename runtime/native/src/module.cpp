// Bindings of the core: check every shape and bound, release the interpreter lock, and call code that trusts its
// arguments. Bad arguments raise ValueError with the numbers; failures of the device raise OSError.
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings.h"
#include "coactivation.h"
#include "cpu.h"
#include "crc32c.h"
#include "plan.h"
#include "ranges.h"
#include "reads.h"
#include "ring_reads.h"

namespace coldpress {
namespace {

using Bytes1 = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Positions = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots2 = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Groups = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Steps = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutGroups = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Buffer = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename Count>
using Square = nb::ndarray<Count, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void expect_extents(const Extents& extents, uint64_t buffer_bytes, uint64_t page_bytes, uint64_t pages) {
    for (int64_t i = 0; i < extents.count; ++i) {
        const uint64_t offset = extents.offsets[i], length = extents.lengths[i], into = extents.buffer_offsets[i];
        const auto numbers = [&] {
            return "extent " + text(i) + " (offset " + std::to_string(offset) + ", length " + std::to_string(length) +
                   ", buffer offset " + std::to_string(into) + ") ";
        };
        if (offset % page_bytes || length % page_bytes)
            throw std::invalid_argument(numbers() + "is not made of whole pages of " + std::to_string(page_bytes) +
                                        " bytes");
        if (offset / page_bytes > pages || length / page_bytes > pages - offset / page_bytes)
            throw std::invalid_argument(numbers() + "ends behind the " + std::to_string(pages) +
                                        " pages with a checksum");
        if (length > buffer_bytes || into > buffer_bytes - length)
            throw std::invalid_argument(numbers() + "does not fit into the buffer of " + std::to_string(buffer_bytes) +
                                        " bytes");
    }
}

[[noreturn]] void raise_os_error(const ReadResult& result) {
    const std::string at = " in the read at byte " + std::to_string(result.error_offset);
    const std::string what = result.missing_bytes ? "the file is truncated: " + std::to_string(result.missing_bytes) +
                                                        " bytes are missing" + at
                                                  : std::strerror(result.error) + at;
    const nb::tuple arguments = nb::make_tuple(result.error, what);
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
    throw nb::python_error();
}

using Units = std::tuple<Positions, Ids, Slots2>;  // offsets in the buffer, slots, the rows that slots index

Landing landing_of(const std::optional<Units>& units, uint64_t buffer_bytes) {
    if (!units) return {};
    const auto& [offsets, slots, rows] = *units;
    const int64_t count = static_cast<int64_t>(offsets.shape(0)), unit_bytes = static_cast<int64_t>(rows.shape(1));
    expect_length("slots", slots.shape(0), count);
    expect_slots(slots, rows.shape(0));
    for (int64_t i = 0; i < count; ++i)
        expect(offsets.data()[i] >= (i ? offsets.data()[i - 1] : 0) &&
                   static_cast<uint64_t>(offsets.data()[i]) + static_cast<uint64_t>(unit_bytes) <= buffer_bytes,
               "unit " + text(i) + " at byte " + text(offsets.data()[i]) + " is before another or outside the buffer of " +
                   std::to_string(buffer_bytes) + " bytes");
    return {offsets.data(), slots.data(), count, unit_bytes, rows.data()};
}

// Reads in flight, with the arrays that must outlive them.
struct PendingReads {
    Buffer buffer;
    std::optional<Units> units;
    Checksums page_crc32c;
    int64_t count;
    std::unique_ptr<Reads> reads;

    bool wait(int64_t extents) {
        expect(extents >= 0 && extents <= count,
               text(extents) + " extents are waited for, expected 0 to " + text(count));
        const nb::gil_scoped_release release;
        return reads->wait(extents);
    }

    int64_t finish() {
        ReadResult result;
        {
            const nb::gil_scoped_release release;
            result = reads->finish();
        }
        if (result.error) raise_os_error(result);
        return result.bad_page;
    }
};

// Makes a `Kind` of reads from checked arguments; `at_once` is the number of reads that may be in flight.
template <typename Kind>
PendingReads start(int fd, const Offsets& offsets, const Offsets& lengths, const Buffer& buffer,
                   const Offsets& buffer_offsets, int64_t page_bytes, const Checksums& page_crc32c, int at_once,
                   const std::optional<Units>& units) {
    const int64_t count = static_cast<int64_t>(offsets.shape(0));
    expect(page_bytes > 0, "page_bytes is " + text(page_bytes) + ", expected a positive number");
    expect_length("lengths", lengths.shape(0), count);
    expect_length("buffer_offsets", buffer_offsets.shape(0), count);
    const Extents extents{offsets.data(), lengths.data(), buffer_offsets.data(), count};
    expect_extents(extents, buffer.shape(0), static_cast<uint64_t>(page_bytes), page_crc32c.shape(0));
    const Landing landing = landing_of(units, buffer.shape(0));
    const Request request{fd, extents, buffer.data(), page_bytes, page_crc32c.data(), landing};
    return {buffer, units, page_crc32c, count, std::make_unique<Kind>(request, at_once)};
}

PendingReads start_reads(int fd, const Offsets& offsets, const Offsets& lengths, const Buffer& buffer,
                         const Offsets& buffer_offsets, int64_t page_bytes, const Checksums& page_crc32c,
                         int num_threads, const std::optional<Units>& units) {
    return start<ThreadReads>(fd, offsets, lengths, buffer, buffer_offsets, page_bytes, page_crc32c,
                              threads_of(num_threads), units);
}

PendingReads start_ring_reads(int fd, const Offsets& offsets, const Offsets& lengths, const Buffer& buffer,
                              const Offsets& buffer_offsets, int64_t page_bytes, const Checksums& page_crc32c,
                              int depth, const std::optional<Units>& units) {
    expect(depth >= 1, "depth is " + text(depth) + ", expected at least 1");
    expect(ring_error() == 0, "the kernel refuses io_uring; ask ring_error() first");
    return start<RingReads>(fd, offsets, lengths, buffer, buffer_offsets, page_bytes, page_crc32c, depth, units);
}

// Zeroed without being touched: the system supplies large blocks as zero pages, which take no memory until used.
template <typename T>
auto new_array(size_t count, size_t alignment) {
    void* memory = std::calloc(1, count * sizeof(T) + alignment);
    if (!memory) throw std::bad_alloc();
    const auto start = (reinterpret_cast<uintptr_t>(memory) + alignment - 1) / alignment * alignment;
    const nb::capsule owner(memory, [](void* p) noexcept { std::free(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(reinterpret_cast<T*>(start), {count}, owner);
}

auto array_of(const std::vector<int64_t>& values) {
    auto array = new_array<int64_t>(values.size(), 64);
    std::copy(values.begin(), values.end(), array.data());
    return array;
}

auto planned_reads(const Positions& positions, int64_t offset_bytes, int64_t unit_bytes, int64_t stride_bytes,
                   int64_t page_bytes, int64_t gap_bytes, int64_t max_bytes) {
    expect(page_bytes > 0 && unit_bytes > 0, "a page has " + text(page_bytes) + " bytes, a unit " + text(unit_bytes) +
                                                 ", expected positive numbers");
    const int64_t needed = ((unit_bytes - 1 + page_bytes - 1) / page_bytes + 1) * page_bytes;
    expect(max_bytes >= needed, "max_bytes is " + text(max_bytes) + ", one unit may need " + text(needed));
    const size_t count = positions.shape(0);
    auto unit_extent = new_array<int64_t>(count, 64), unit_offset = new_array<int64_t>(count, 64);
    const PlannedReads found =
        plan_reads(positions.data(), static_cast<int64_t>(count), {offset_bytes, unit_bytes, stride_bytes},
                   {page_bytes, gap_bytes, max_bytes}, unit_extent.data(), unit_offset.data());
    return std::make_tuple(array_of(found.offsets), array_of(found.lengths), unit_extent, unit_offset);
}

auto counted_reads(const Positions& positions, const Positions& stops, int64_t offset_bytes, int64_t unit_bytes,
                   int64_t stride_bytes, int64_t page_bytes, const Positions& gaps) {
    expect(page_bytes > 0 && unit_bytes > 0, "a page has " + text(page_bytes) + " bytes, a unit " + text(unit_bytes) +
                                                 ", expected positive numbers");
    const int64_t num_requests = static_cast<int64_t>(stops.shape(0)), num_gaps = static_cast<int64_t>(gaps.shape(0));
    const int64_t count = static_cast<int64_t>(positions.shape(0));
    for (int64_t r = 0; r < num_requests; ++r)
        expect(stops(r) <= count, "request " + text(r) + " stops at " + text(stops(r)) + " of " + text(count) + " units");
    auto reads = new_array<int64_t>(stops.shape(0) * gaps.shape(0), 64);
    auto read_bytes = new_array<int64_t>(stops.shape(0) * gaps.shape(0), 64);
    const nb::gil_scoped_release release;
    count_reads(positions.data(), stops.data(), num_requests, {offset_bytes, unit_bytes, stride_bytes}, page_bytes,
                gaps.data(), num_gaps, reads.data(), read_bytes.data());
    return std::make_tuple(reads, read_bytes);
}

// Of each page of the data, the last one padded with zeros.
auto checksums_of(const Bytes1& data, int64_t page_bytes) {
    expect(page_bytes > 0, "page_bytes is " + text(page_bytes) + ", expected a positive number");
    const int64_t bytes = static_cast<int64_t>(data.shape(0)), whole = bytes / page_bytes, rest = bytes % page_bytes;
    auto sums = new_array<uint32_t>(static_cast<size_t>(whole + (rest != 0)), 64);
    const nb::gil_scoped_release release;
    crc32c_pages(data.data(), whole, page_bytes, sums.data());
    if (rest) sums.data()[whole] = crc32c_padded(data.data() + whole * page_bytes, rest, page_bytes - rest);
    return sums;
}

template <typename Count>
void counted_pairs(const Words& words, const Square<Count>& counts, int num_threads) {
    const int64_t num_units = static_cast<int64_t>(words.shape(0));
    expect_shape("counts", counts, num_units, num_units);
    const nb::gil_scoped_release release;
    count_pairs(words.data(), num_units, static_cast<int64_t>(words.shape(1)), counts.data(), threads_of(num_threads));
}

template <typename Count>
void joined_links(const Square<const Count>& counts, const Ids& units, int64_t run_pairs, const Order& order) {
    const int64_t num_units = static_cast<int64_t>(counts.shape(0)), num_ordered = static_cast<int64_t>(units.shape(0));
    expect_length("a row of counts", counts.shape(1), num_units);
    expect_length("order", order.shape(0), num_ordered);
    for (int64_t i = 0; i < num_ordered; ++i)
        expect(units.data()[i] > (i ? units.data()[i - 1] : -1) && units.data()[i] < num_units,
               "unit " + text(units.data()[i]) + " at index " + text(i) + " is not above the one before it and below " +
                   text(num_units));
    const nb::gil_scoped_release release;
    join_links(counts.data(), num_units, units.data(), num_ordered, run_pairs, order.data());
}

template <typename Count>
void bind_coactivation(nb::module_& m) {
    using namespace nb::literals;
    m.def("count_pairs", &counted_pairs<Count>, nb::arg("words").noconvert(), nb::arg("counts").noconvert(),
          "num_threads"_a = 0);
    m.def("join_links", &joined_links<Count>, nb::arg("counts").noconvert(), nb::arg("units").noconvert(),
          "run_pairs"_a, nb::arg("order").noconvert());
}

constexpr size_t kHugePageBytes = 2 << 20;
constexpr size_t kManyPages = 64 << 10;  // smaller buffers are few segments anyway

// Memory of its own mapping that begins on a huge page.
struct Mapping {
    void* start;
    size_t bytes;
    explicit Mapping(size_t wanted) : start(MAP_FAILED), bytes(wanted + kHugePageBytes) {
        start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED) throw std::bad_alloc();
    }
    ~Mapping() { munmap(start, bytes); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    uint8_t* data() const {
        const auto first = reinterpret_cast<uintptr_t>(start) + kHugePageBytes - 1;
        return reinterpret_cast<uint8_t*>(first / kHugePageBytes * kHugePageBytes);
    }
};

// Makes the system use huge pages, if it has them, also for the last part of `bytes`: a read into a huge page is one
// segment for the device instead of one for every 4 KiB. The rest of the last huge page is given back at once; what
// stays is as contiguous as before.
void use_huge_pages([[maybe_unused]] uint8_t* data, [[maybe_unused]] size_t bytes, [[maybe_unused]] size_t whole) {
#if defined(MADV_HUGEPAGE)
    madvise(data, whole, MADV_HUGEPAGE);  // only a hint, which the system may refuse
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), used = (bytes + page - 1) / page * page;
    if (used == whole) return;
    *static_cast<volatile uint8_t*>(data + whole - kHugePageBytes) = 0;
    madvise(data + used, whole - used, MADV_DONTNEED);
#endif
}

auto aligned_buffer(int64_t nbytes) {
    expect(nbytes >= 0 && nbytes <= (int64_t{1} << 46), "a buffer of " + text(nbytes) + " bytes is not possible");
    const size_t bytes = static_cast<size_t>(nbytes);
    if (bytes < kManyPages) return new_array<uint8_t>(bytes, 64 << 10);
    const size_t whole = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    auto mapping = std::make_unique<Mapping>(whole);
    use_huge_pages(mapping->data(), bytes, whole);
    uint8_t* const data = mapping->data();
    const nb::capsule owner(mapping.release(), [](void* p) noexcept { delete static_cast<Mapping*>(p); });
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes}, owner);
}

void expect_priced(const Groups& values, const Groups& prices) {
    const int64_t count = static_cast<int64_t>(values.shape(0)), size = static_cast<int64_t>(values.shape(1));
    const int64_t priced = static_cast<int64_t>(prices.shape(0));
    expect(size >= 1 && size <= kMostGroup, "a group has " + text(size) + " values, expected 1 to " + text(kMostGroup));
    expect_length("a group of prices", prices.shape(1), size);
    expect(count == 0 || (priced > 0 && count % priced == 0),
           text(count) + " groups of values are no multiple of " + text(priced) + " groups of prices");
}

void fit_groups(const Groups& values, const Groups& prices, int highest, int zero, const OutGroups& steps,
                const OutGroups& starts, int num_threads) {
    const int64_t count = static_cast<int64_t>(values.shape(0)), size = static_cast<int64_t>(values.shape(1));
    const int64_t priced = static_cast<int64_t>(prices.shape(0));
    expect_priced(values, prices);
    expect(highest >= 1 && highest <= 255 && zero >= -1 && zero <= highest,
           "numbers reach " + text(highest) + " around " + text(zero) + ", expected at most 255 and a zero among them");
    expect_length("steps", steps.shape(0), count);
    expect_length("starts", starts.shape(0), count);
    const nb::gil_scoped_release release;
    fit_ranges(values.data(), count, size, prices.data(), priced, {highest, zero}, steps.data(), starts.data(),
               threads_of(num_threads));
}

void scale_groups(const Groups& values, const Groups& prices, const Steps& levels, const OutGroups& scales,
                  int num_threads) {
    const int64_t count = static_cast<int64_t>(values.shape(0)), size = static_cast<int64_t>(values.shape(1));
    const int64_t num_levels = static_cast<int64_t>(levels.shape(0));
    expect(num_levels >= 2 && num_levels <= kMostLevels,
           "there are " + text(num_levels) + " levels, expected 2 to " + text(kMostLevels));
    expect_priced(values, prices);
    expect_length("scales", scales.shape(0), count);
    const nb::gil_scoped_release release;
    fit_scales(values.data(), count, size, prices.data(), static_cast<int64_t>(prices.shape(0)), levels.data(),
               num_levels, scales.data(), threads_of(num_threads));
}

void number_groups(const Groups& values, const Steps& steps, const Steps& starts, int highest, const Slots2& out,
                   int num_threads) {
    const int64_t count = static_cast<int64_t>(values.shape(0)), size = static_cast<int64_t>(values.shape(1));
    expect(highest >= 1 && highest <= 255, "numbers reach " + text(highest) + ", expected at most 255");
    expect_length("steps", steps.shape(0), count);
    expect_length("starts", starts.shape(0), count);
    expect_length("out", out.shape(0), count);
    expect_length("a group of out", out.shape(1), size);
    const nb::gil_scoped_release release;
    nearest_numbers(values.data(), count, size, steps.data(), starts.data(), highest, out.data(),
                    threads_of(num_threads));
}

void set_num_threads(int num_threads) {
    expect(num_threads >= 1 && num_threads <= 1024, "num_threads is " + text(num_threads) + ", expected 1 to 1024");
    set_default_threads(num_threads);
}

}  // namespace
}  // namespace coldpress

NB_MODULE(_native, m) {
    using namespace coldpress;
    using namespace nb::literals;
    m.doc() = "The native core: products with quantized rows, attention, checked reads. Sums are float32.";
    choose_cpu();
    nb::set_leak_warnings(false);  // an interpreter that exits during a read would report harmless leaks
    bind_products(m);
    bind_coactivation<uint16_t>(m);
    bind_coactivation<uint32_t>(m);
    nb::class_<PendingReads>(m, "Reads", "Reads under way; a reference less waits for them.")
        .def("wait", &PendingReads::wait, "count"_a,
             "Waits until the first `count` extents are there; whether all of them came whole.")
        .def("finish", &PendingReads::finish,
             "Waits for all; the first page of the file with a wrong checksum, or -1.");
    m.def("start_reads", &start_reads, "fd"_a, nb::arg("offsets").noconvert(), nb::arg("lengths").noconvert(),
          nb::arg("buffer").noconvert(), nb::arg("buffer_offsets").noconvert(), "page_bytes"_a,
          nb::arg("page_crc32c").noconvert(), "num_threads"_a, nb::arg("units").noconvert().none() = nb::none(),
          "Begins to read the extents, in their order, up to num_threads at once. units = (offsets in the buffer, "
          "slots, rows): these are copied to rows[slots] as they arrive.");
    m.def("start_ring_reads", &start_ring_reads, "fd"_a, nb::arg("offsets").noconvert(), nb::arg("lengths").noconvert(),
          nb::arg("buffer").noconvert(), nb::arg("buffer_offsets").noconvert(), "page_bytes"_a,
          nb::arg("page_crc32c").noconvert(), "depth"_a, nb::arg("units").noconvert().none() = nb::none(),
          "As start_reads, through io_uring, up to depth at once.");
    m.def("plan_reads", &planned_reads, nb::arg("positions").noconvert(), "offset_bytes"_a, "unit_bytes"_a,
          "stride_bytes"_a, "page_bytes"_a, "gap_bytes"_a, "max_bytes"_a);
    m.def("count_reads", &counted_reads, nb::arg("positions").noconvert(), nb::arg("stops").noconvert(),
          "offset_bytes"_a, "unit_bytes"_a, "stride_bytes"_a, "page_bytes"_a, nb::arg("gaps").noconvert());
    m.def("ring_error", &ring_error, "0, or the errno with which the kernel refuses io_uring.");
    m.def("crc32c_pages", &checksums_of, "data"_a, "page_bytes"_a);
    m.def("aligned_buffer", &aligned_buffer, "nbytes"_a,
          "A zeroed array of bytes that begins on 64 KiB, in huge pages if it has many pages.");
    m.def("fit_ranges", &fit_groups, nb::arg("values").noconvert(), nb::arg("prices").noconvert(), "highest"_a, "zero"_a,
          nb::arg("steps").noconvert(), nb::arg("starts").noconvert(), "num_threads"_a = 0);
    m.def("fit_scales", &scale_groups, nb::arg("values").noconvert(), nb::arg("prices").noconvert(),
          nb::arg("levels").noconvert(), nb::arg("scales").noconvert(), "num_threads"_a = 0);
    m.def("nearest_numbers", &number_groups, nb::arg("values").noconvert(), nb::arg("steps").noconvert(),
          nb::arg("starts").noconvert(), "highest"_a, nb::arg("out").noconvert(), "num_threads"_a = 0);
    m.def("cpu", [] { return std::string(kernels().name); }, "The instruction set in use.");
    m.def("cpus", &available_cpus, "The instruction sets that this machine can run, slowest first.");
    m.def("use_cpu", &use_cpu, "name"_a, "Changes the instruction set in use, for tests and measurements.");
    m.def("num_threads", &default_threads, "Threads of a kernel that is not told otherwise.");
    m.def("set_num_threads", &set_num_threads, "num_threads"_a, "Changes it, for the whole process.");
}
