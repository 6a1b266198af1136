// Bindings of the products: check every shape and bound, release the interpreter lock, and call code that trusts its
// arguments.
#include <algorithm>
#include <tuple>

#include "attention.h"
#include "bindings.h"
#include "encode.h"
#include "intervals.h"
#include "matrix.h"
#include "mlp.h"
#include "rows.h"

namespace coldpress {
namespace {

using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;  // rows need not be adjacent
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats3 = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Bytes3 = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Out1 = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutBytes3 = nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask2 = nb::ndarray<bool, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Rows of `length` values of a two-dimensional array of bytes: one of each stored row, or the first of `adjacent` ones,
// which begin at `offset`.
Rows rows_of(const Bytes2& store, const int32_t* slots, size_t count, int64_t offset, int64_t length,
             const std::string& format, int64_t adjacent = 1) {
    const Format known = format_of(format.c_str());
    const int64_t width = static_cast<int64_t>(store.shape(1));
    expect(width <= 1 || store.stride(1) == 1, "the bytes of a row are not contiguous");
    expect(store.shape(0) <= 1 || store.stride(0) >= 0, "the rows are stored backwards");
    expect(length >= 0 && length <= (int64_t{1} << 40), "a row of " + text(length) + " values is not possible");
    expect(block_values(known) == kBlock || length % block_values(known) == 0,
           "a row of " + text(length) + " values has no whole number of blocks of " + text(block_values(known)) + " in " +
               format);
    const int64_t bytes = row_bytes(known, length);
    expect(offset >= 0 && offset <= width && bytes <= (width - offset) / std::max<int64_t>(1, adjacent),
           (adjacent == 1 ? "a row" : text(adjacent) + " rows") + " of " + text(length) + " values in " + format +
               " at byte " + text(offset) + (adjacent == 1 ? " takes " : " take, each, ") + text(bytes) +
               " bytes, but the stored rows have " + text(width));
    const int64_t stride = store.shape(0) <= 1 ? width : store.stride(0);
    return {store.data() + offset, stride, slots, static_cast<int64_t>(count), length, known};
}

void expect_bits(int bits) {
    expect(bits == 0 || bits == 8 || bits == 16,
           "activation_bits is " + text(bits) + ", expected 8 or 16, or 0 for float32");
}

// The number of vectors that rows multiply together.
int64_t tokens_of(const Floats2& x, int64_t length) {
    const int64_t tokens = static_cast<int64_t>(x.shape(0));
    expect(tokens >= 1 && tokens <= 1024, text(tokens) + " vectors are to be multiplied with, expected 1 to 1024");
    expect_length("a row of x", x.shape(1), length);
    return tokens;
}

void dot_rows(const Bytes2& store, const std::optional<Ids>& slots, int64_t offset, int64_t length,
              const std::string& format, const Floats2& x, const Out2& out, int num_threads, int activation_bits) {
    expect_bits(activation_bits);
    const Rows rows = slots ? rows_of(store, slots->data(), slots->shape(0), offset, length, format)
                            : rows_of(store, nullptr, store.shape(0), offset, length, format);
    if (slots) expect_slots(*slots, store.shape(0));
    const int64_t tokens = tokens_of(x, length);
    expect_shape("out", out, tokens, rows.count);
    const nb::gil_scoped_release release;
    dot(rows, x.data(), static_cast<int>(tokens), activation_bits, out.data(), threads_of(num_threads));
}

void axpy_rows(const Bytes2& store, const Ids& slots, int64_t offset, int64_t length, const std::string& format,
               const Floats1& coefficients, const Out1& out, int num_threads) {
    const Rows rows = rows_of(store, slots.data(), slots.shape(0), offset, length, format);
    expect_slots(slots, store.shape(0));
    expect_length("coefficients", coefficients.shape(0), rows.count);
    expect_length("out", out.shape(0), length);
    const nb::gil_scoped_release release;
    axpy(rows, coefficients.data(), out.data(), threads_of(num_threads));
}

// Where units have the rows of a projection, if they do: their offset, and the name of their format.
using Slice = std::optional<std::tuple<int64_t, std::string>>;

const float* data_of(const char* name, const std::optional<Floats1>& found, int64_t expected) {
    if (!found) return nullptr;
    expect_length(name, found->shape(0), expected);
    return found->data();
}

// A unit is a neuron, whose slice of down is a column, or a `block` of neurons.
void mlp_of_units(const Bytes2& store, const Ids& slots, const Slice& gate, const Slice& up,
                  const std::tuple<int64_t, std::string>& down, int64_t block, int64_t length,
                  const std::string& activation, float threshold, const Floats2& x,
                  const std::optional<Floats1>& gate_bias, const std::optional<Floats1>& up_bias,
                  const std::optional<Floats2>& factors, const Out2& out, int num_threads, int activation_bits) {
    expect(block == 1 || (block > 0 && block % kBlock == 0 && block <= 1 << 20),
           "a block of " + text(block) + " neurons, expected a multiple of " + text(kBlock) + " up to 1048576");
    expect_bits(activation_bits);
    const auto rows_at = [&](const auto& slice, int64_t values, int64_t adjacent) {
        const auto& [offset, format] = slice;
        return rows_of(store, slots.data(), slots.shape(0), offset, values, format, adjacent);
    };
    const Rows of_down = block == 1 ? rows_at(down, length, 1) : rows_at(down, block, length);
    expect_slots(slots, store.shape(0));
    const Activation of_gate = activation_of(activation.c_str()), of_up = up_activation_of(activation.c_str());
    Projection projections[2];
    int num_projections = 0;
    const auto add = [&](const Slice& slice, const char* bias_name, const std::optional<Floats1>& bias,
                         Activation function) {
        if (!slice) return;
        const float* const own = data_of(bias_name, bias, of_down.count * block);
        const Format format = rows_at(*slice, length, block).format;
        projections[num_projections++] = {std::get<0>(*slice), own, function, format};
    };
    add(gate, "gate_bias", gate_bias, of_gate);
    add(up, "up_bias", up_bias, of_up);
    const int64_t tokens = tokens_of(x, length);
    expect_shape("out", out, tokens, length);
    if (factors) expect_shape("factors", *factors, tokens, of_down.count);
    const Rows units{store.data(), of_down.stride, of_down.slots, of_down.count, length, of_down.format};
    const Mlp wanted{units, projections, num_projections, factors ? factors->data() : nullptr, std::get<0>(down),
                     of_down.length, threshold, activation_bits};
    const nb::gil_scoped_release release;
    (block == 1 ? mlp : mlp_blocks)(wanted, x.data(), static_cast<int>(tokens), out.data(), threads_of(num_threads));
}

void matmul_rows(const Bytes2& matrix, int64_t length, const std::string& format, const Floats2& x, const Out2& out,
                 int num_threads) {
    const Rows rows = rows_of(matrix, nullptr, matrix.shape(0), 0, length, format);
    const int64_t tokens = static_cast<int64_t>(x.shape(0));
    expect_length("a row of x", x.shape(1), length);
    expect_shape("out", out, tokens, rows.count);
    const nb::gil_scoped_release release;
    matmul(rows, x.data(), tokens, out.data(), threads_of(num_threads));
}

void matmul_columns(const Bytes2& matrix, int64_t length, const std::string& format, const Floats2& c, const Out2& out,
                    int num_threads) {
    const Rows rows = rows_of(matrix, nullptr, matrix.shape(0), 0, length, format);
    const int64_t tokens = static_cast<int64_t>(c.shape(0));
    expect_length("a row of c", c.shape(1), rows.count);
    expect_shape("out", out, tokens, length);
    const nb::gil_scoped_release release;
    matmul_t(rows, c.data(), tokens, out.data(), threads_of(num_threads));
}

void decode_rows(const Bytes2& matrix, int64_t length, const std::string& format, const Out2& out, int num_threads) {
    const Rows rows = rows_of(matrix, nullptr, matrix.shape(0), 0, length, format);
    expect_shape("out", out, rows.count, length);
    const nb::gil_scoped_release release;
    decode(rows, out.data(), threads_of(num_threads));
}

uint64_t stream_words(const Words& words, int num_threads) {
    const nb::gil_scoped_release release;
    return read_through(words.data(), static_cast<int64_t>(words.shape(0)), threads_of(num_threads));
}

void attend_rows(const std::string& format, const Floats2& queries, const Bytes3& keys, const Bytes3& values,
                 int64_t start, int64_t stop, float scale, float softcap, const std::optional<Floats1>& sinks,
                 const Out2& out, int num_threads) {
    const int64_t context = static_cast<int64_t>(keys.shape(0)), kv_heads = static_cast<int64_t>(keys.shape(1));
    const int64_t heads = static_cast<int64_t>(queries.shape(0)), head_dim = static_cast<int64_t>(queries.shape(1));
    const Format known = format_of(format.c_str());
    const int64_t head_bytes = row_bytes(known, head_dim);
    expect(kv_heads > 0 && heads % kv_heads == 0,
           text(heads) + " query heads cannot share " + text(kv_heads) + " key heads evenly");
    expect_length("a key", keys.shape(2), head_bytes);
    for (size_t axis = 0; axis < 3; ++axis)
        expect(values.shape(axis) == keys.shape(axis), "keys and values differ in shape at axis " + text(axis));
    expect(
        start >= 0 && start < stop && stop <= context,
        "positions " + text(start) + " to " + text(stop) + " are not a range inside the context of " + text(context));
    expect_shape("out", out, heads, head_dim);
    const int64_t skipped = start * kv_heads * head_bytes;
    const Attention a{queries.data(), keys.data() + skipped, values.data() + skipped, known, heads, kv_heads, head_dim,
                      stop - start, scale, softcap, data_of("sinks", sinks, heads)};
    const nb::gil_scoped_release release;
    attend(a, out.data(), threads_of(num_threads));
}

float encode_heads(const Floats3& values, const OutBytes3& out) {
    const int64_t head_dim = static_cast<int64_t>(values.shape(2));
    for (size_t axis = 0; axis < 2; ++axis)
        expect(out.shape(axis) == values.shape(axis), "values and out differ in shape at axis " + text(axis));
    expect_length("a head of out", out.shape(2), row_bytes(Format::int8_group32, head_dim));
    const int64_t count = static_cast<int64_t>(values.shape(0) * values.shape(1));
    const nb::gil_scoped_release release;
    return encode_int8(values.data(), count, head_dim, out.data());
}

void choose_intervals(const Floats2& gain, double price, double read_units, double edge_units, double overlap,
                      int steps, const Mask2& chosen) {
    for (size_t axis = 0; axis < 2; ++axis)
        expect(gain.shape(axis) == chosen.shape(axis), "gain and chosen differ in shape at axis " + text(axis));
    expect(overlap >= 0 && overlap <= 1, "overlap is " + std::to_string(overlap) + ", expected 0 to 1");
    expect(steps >= 1 && steps <= 64, "steps is " + text(steps) + ", expected 1 to 64");
    const int64_t tokens = static_cast<int64_t>(gain.shape(0)), units = static_cast<int64_t>(gain.shape(1));
    const nb::gil_scoped_release release;
    best_intervals(gain.data(), tokens, units, price, {read_units, edge_units, overlap}, steps,
                   reinterpret_cast<uint8_t*>(chosen.data()));
}

}  // namespace

void bind_products(nb::module_& m) {
    using namespace nb::literals;
    m.def("dot_rows", &dot_rows, nb::arg("store").noconvert(), nb::arg("slots").noconvert().none(), "offset"_a,
          "length"_a, "format"_a, nb::arg("x").noconvert(), nb::arg("out").noconvert(), "num_threads"_a = 0,
          "activation_bits"_a = 0);
    m.def("axpy_rows", &axpy_rows, nb::arg("store").noconvert(), nb::arg("slots").noconvert(), "offset"_a, "length"_a,
          "format"_a, nb::arg("coefficients").noconvert(), nb::arg("out").noconvert(), "num_threads"_a = 0);
    m.def("mlp", &mlp_of_units, nb::arg("store").noconvert(), nb::arg("slots").noconvert(), nb::arg("gate").none(),
          nb::arg("up").none(), "down"_a, "block"_a, "length"_a, "activation"_a, "threshold"_a,
          nb::arg("x").noconvert(), nb::arg("gate_bias").noconvert().none(), nb::arg("up_bias").noconvert().none(),
          nb::arg("factors").noconvert().none(), nb::arg("out").noconvert(), "num_threads"_a = 0,
          "activation_bits"_a = 0);
    m.def("matmul", &matmul_rows, nb::arg("matrix").noconvert(), "length"_a, "format"_a, nb::arg("x").noconvert(),
          nb::arg("out").noconvert(), "num_threads"_a = 0);
    m.def("matmul_t", &matmul_columns, nb::arg("matrix").noconvert(), "length"_a, "format"_a,
          nb::arg("c").noconvert(), nb::arg("out").noconvert(), "num_threads"_a = 0);
    m.def("decode_rows", &decode_rows, nb::arg("matrix").noconvert(), "length"_a, "format"_a,
          nb::arg("out").noconvert(), "num_threads"_a = 0);
    m.def("read_through", &stream_words, nb::arg("words").noconvert(), "num_threads"_a = 0,
          "Reads memory from beginning to end, to measure how fast that is; the words' exclusive or.");
    m.def("attend", &attend_rows, "format"_a, nb::arg("queries").noconvert(), nb::arg("keys").noconvert(),
          nb::arg("values").noconvert(), "start"_a, "stop"_a, "scale"_a, "softcap"_a,
          nb::arg("sinks").noconvert().none(), nb::arg("out").noconvert(), "num_threads"_a = 0);
    m.def("encode_int8", &encode_heads, nb::arg("values").noconvert(), nb::arg("out").noconvert());
    m.def("best_intervals", &choose_intervals, nb::arg("gain").noconvert(), "price"_a, "read_units"_a, "edge_units"_a,
          "overlap"_a, "steps"_a, nb::arg("chosen").noconvert());
}

}  // namespace coldpress
