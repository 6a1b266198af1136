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
using Halves3 = nb::ndarray<const uint16_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Out1 = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutBytes2 = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
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
    return {store.data() + offset,
            store.shape(0) <= 1 ? width : store.stride(0),
            slots,
            static_cast<int64_t>(count),
            length,
            known};
}

void expect_bits(int bits) {
    expect(bits == 0 || bits == 8 || bits == 16,
           "activation_bits is " + text(bits) + ", expected 8 or 16, or 0 for float32");
}

void dot_rows(const Bytes2& store, const Ids& slots, int64_t offset, int64_t length, const std::string& format,
              const Floats1& x, const Out1& out, int num_threads, int activation_bits) {
    expect_bits(activation_bits);
    const Rows rows = rows_of(store, slots.data(), slots.shape(0), offset, length, format);
    expect_slots(slots, store.shape(0));
    expect_length("x", x.shape(0), length);
    expect_length("out", out.shape(0), rows.count);
    const int threads = threads_of(num_threads);
    const nb::gil_scoped_release release;
    dot(rows, x.data(), 1, activation_bits, out.data(), threads);
}

void axpy_rows(const Bytes2& store, const Ids& slots, int64_t offset, int64_t length, const std::string& format,
               const Floats1& coefficients, const Out1& out, int num_threads) {
    const Rows rows = rows_of(store, slots.data(), slots.shape(0), offset, length, format);
    expect_slots(slots, store.shape(0));
    expect_length("coefficients", coefficients.shape(0), rows.count);
    expect_length("out", out.shape(0), length);
    const int threads = threads_of(num_threads);
    const nb::gil_scoped_release release;
    axpy(rows, coefficients.data(), out.data(), threads);
}

// A projection's slice in a unit, if it has one: its offset and the name of its format.
using Slice = std::optional<std::tuple<int64_t, std::string>>;

const float* data_of(const char* name, const std::optional<Floats1>& found, int64_t expected) {
    if (!found) return nullptr;
    expect_length(name, found->shape(0), expected);
    return found->data();
}

// What is computed with the units of an MLP, whose slices have been checked.
class MlpOfUnits {
   public:
    // `block` neurons in a unit, or 0: a neuron whose slice of down is a column.
    MlpOfUnits(const Bytes2& store, const Ids& slots, const Slice& gate, const Slice& up,
               const std::tuple<int64_t, std::string>& down, int64_t block, int64_t length, const std::string& activation,
               float threshold, const std::optional<Floats1>& gate_bias, const std::optional<Floats1>& up_bias,
               int activation_bits) {
        expect_bits(activation_bits);
        const auto rows_at = [&](const auto& slice, int64_t values, int64_t adjacent) {
            const auto& [offset, format] = slice;
            return rows_of(store, slots.data(), slots.shape(0), offset, values, format, adjacent);
        };
        const Rows of_down = rows_at(down, block ? block : length, block ? length : 1);
        expect_slots(slots, store.shape(0));
        const Activation of_gate = activation_of(activation.c_str()), of_up = up_activation_of(activation.c_str());
        const int64_t neurons = std::max<int64_t>(1, block);
        int num_projections = 0;
        const auto add = [&](const Slice& slice, const char* bias_name, const std::optional<Floats1>& bias,
                             Activation function) {
            if (!slice) return;
            const float* const own = data_of(bias_name, bias, of_down.count * neurons);
            const Format format = rows_at(*slice, length, neurons).format;
            projections_[num_projections++] = {std::get<0>(*slice), own, function, format};
        };
        add(gate, "gate_bias", gate_bias, of_gate);
        add(up, "up_bias", up_bias, of_up);
        const Rows units{store.data(), of_down.stride, of_down.slots, of_down.count, length, of_down.format};
        mlp_ = {units, projections_, num_projections, nullptr, std::get<0>(down), of_down.length, threshold, activation_bits};
    }
    MlpOfUnits(const MlpOfUnits&) = delete;

    // out[t] = compute's result for x[t]
    void run(decltype(mlp)& compute, const Floats2& x, const std::optional<Floats2>& factors, const Out2& out,
             int num_threads) {
        const int64_t tokens = static_cast<int64_t>(x.shape(0)), length = mlp_.units.length;
        expect(tokens >= 1 && tokens <= 1024, text(tokens) + " vectors are to be multiplied with, expected 1 to 1024");
        expect_length("a row of x", x.shape(1), length);
        expect_length("out", out.shape(0), tokens);
        expect_length("a row of out", out.shape(1), length);
        if (factors) {
            expect_length("factors", factors->shape(0), tokens);
            expect_length("a row of factors", factors->shape(1), mlp_.units.count);
            mlp_.factors = factors->data();
        }
        const int threads = threads_of(num_threads);
        const nb::gil_scoped_release release;
        compute(mlp_, x.data(), static_cast<int>(tokens), out.data(), threads);
    }

   private:
    Projection projections_[2];
    Mlp mlp_;
};

void mlp_rows(const Bytes2& store, const Ids& slots, const Slice& gate, const Slice& up, int64_t down_offset,
              int64_t length, const std::string& format, const std::string& activation, float threshold, const Floats2& x,
              const std::optional<Floats1>& gate_bias, const std::optional<Floats1>& up_bias,
              const std::optional<Floats2>& factors, const Out2& out, int num_threads, int activation_bits) {
    MlpOfUnits wanted(store, slots, gate, up, {down_offset, format}, 0, length, activation, threshold, gate_bias, up_bias,
                      activation_bits);
    wanted.run(mlp, x, factors, out, num_threads);
}

void mlp_of_blocks(const Bytes2& store, const Ids& slots, const Slice& gate, const Slice& up,
                   const std::tuple<int64_t, std::string>& down, int64_t block, int64_t length,
                   const std::string& activation, float threshold, const Floats2& x,
                   const std::optional<Floats1>& gate_bias, const std::optional<Floats1>& up_bias,
                   const std::optional<Floats2>& factors, const Out2& out, int num_threads, int activation_bits) {
    expect(block > 0 && block % kBlock == 0 && block <= 1 << 20,
           "a block of " + text(block) + " neurons, expected a multiple of " + text(kBlock) + " up to 1048576");
    MlpOfUnits wanted(store, slots, gate, up, down, block, length, activation, threshold, gate_bias, up_bias,
                      activation_bits);
    wanted.run(mlp_blocks, x, factors, out, num_threads);
}

void gemv(const Bytes2& matrix, int64_t length, const std::string& format, const Floats1& x, const Out1& out,
          int num_threads, int activation_bits) {
    expect_bits(activation_bits);
    const Rows rows = rows_of(matrix, nullptr, matrix.shape(0), 0, length, format);
    expect_length("x", x.shape(0), length);
    expect_length("out", out.shape(0), rows.count);
    const int threads = threads_of(num_threads);
    const nb::gil_scoped_release release;
    dot(rows, x.data(), 1, activation_bits, out.data(), threads);
}

void gemv_each(const Bytes2& matrix, int64_t length, const std::string& format, const Floats2& x, const Out2& out,
               int num_threads, int activation_bits) {
    expect_bits(activation_bits);
    const Rows rows = rows_of(matrix, nullptr, matrix.shape(0), 0, length, format);
    const int64_t tokens = static_cast<int64_t>(x.shape(0));
    expect(tokens >= 1 && tokens <= 1024, text(tokens) + " vectors are to be multiplied with, expected 1 to 1024");
    expect_length("a row of x", x.shape(1), length);
    expect_length("out", out.shape(0), tokens);
    expect_length("a row of out", out.shape(1), rows.count);
    const int threads = threads_of(num_threads);
    const nb::gil_scoped_release release;
    dot(rows, x.data(), static_cast<int>(tokens), activation_bits, out.data(), threads);
}

void matmul_rows(const Bytes2& matrix, int64_t length, const std::string& format, const Floats2& x, const Out2& out,
                 int num_threads) {
    const Rows rows = rows_of(matrix, nullptr, matrix.shape(0), 0, length, format);
    const int64_t tokens = static_cast<int64_t>(x.shape(0));
    expect_length("a row of x", x.shape(1), length);
    expect_length("out", out.shape(0), tokens);
    expect_length("a row of out", out.shape(1), rows.count);
    const int threads = threads_of(num_threads);
    const nb::gil_scoped_release release;
    matmul(rows, x.data(), tokens, out.data(), threads);
}

void matmul_columns(const Bytes2& matrix, int64_t length, const std::string& format, const Floats2& c, const Out2& out,
                    int num_threads) {
    const Rows rows = rows_of(matrix, nullptr, matrix.shape(0), 0, length, format);
    const int64_t tokens = static_cast<int64_t>(c.shape(0));
    expect_length("a row of c", c.shape(1), rows.count);
    expect_length("out", out.shape(0), tokens);
    expect_length("a row of out", out.shape(1), length);
    const int threads = threads_of(num_threads);
    const nb::gil_scoped_release release;
    matmul_t(rows, c.data(), tokens, out.data(), threads);
}

void decode_rows(const Bytes2& matrix, int64_t length, const std::string& format, const Out2& out, int num_threads) {
    const Rows rows = rows_of(matrix, nullptr, matrix.shape(0), 0, length, format);
    expect_length("out", out.shape(0), rows.count);
    expect_length("a row of out", out.shape(1), length);
    const int threads = threads_of(num_threads);
    const nb::gil_scoped_release release;
    decode(rows, out.data(), threads);
}

uint64_t stream_words(const Words& words, int num_threads) {
    const int threads = threads_of(num_threads);
    const nb::gil_scoped_release release;
    return read_through(words.data(), static_cast<int64_t>(words.shape(0)), threads);
}

// Checks and computes attention over a cache whose last axis has `width` elements.
template <typename Cache>
void attend_in(Format format, int64_t width, const Floats2& queries, const Cache& keys, const Cache& values,
               int64_t start, int64_t stop, float scale, float softcap, const std::optional<Floats1>& sinks,
               const Out2& out, int num_threads) {
    const int64_t context = static_cast<int64_t>(keys.shape(0)), kv_heads = static_cast<int64_t>(keys.shape(1));
    const int64_t heads = static_cast<int64_t>(queries.shape(0)), head_dim = static_cast<int64_t>(queries.shape(1));
    expect(kv_heads > 0 && heads % kv_heads == 0,
           text(heads) + " query heads cannot share " + text(kv_heads) + " key heads evenly");
    expect_length("a key", keys.shape(2), width);
    for (size_t axis = 0; axis < 3; ++axis)
        expect(values.shape(axis) == keys.shape(axis), "keys and values differ in shape at axis " + text(axis));
    expect(
        start >= 0 && start < stop && stop <= context,
        "positions " + text(start) + " to " + text(stop) + " are not a range inside the context of " + text(context));
    expect_length("out", out.shape(0), heads);
    expect_length("a row of out", out.shape(1), head_dim);
    const int64_t skipped = start * kv_heads * row_bytes(format, head_dim);
    const Attention a{queries.data(),
                      reinterpret_cast<const uint8_t*>(keys.data()) + skipped,
                      reinterpret_cast<const uint8_t*>(values.data()) + skipped,
                      format,
                      heads,
                      kv_heads,
                      head_dim,
                      stop - start,
                      scale,
                      softcap,
                      data_of("sinks", sinks, heads)};
    const int threads = threads_of(num_threads);
    const nb::gil_scoped_release release;
    attend(a, out.data(), threads);
}

void attend_rows(const Floats2& queries, const Halves3& keys, const Halves3& values, int64_t start, int64_t stop,
                 float scale, float softcap, const std::optional<Floats1>& sinks, const Out2& out, int num_threads) {
    const int64_t width = static_cast<int64_t>(queries.shape(1));
    attend_in(Format::fp16, width, queries, keys, values, start, stop, scale, softcap, sinks, out, num_threads);
}

void attend_int8(const Floats2& queries, const Bytes3& keys, const Bytes3& values, int64_t start, int64_t stop,
                 float scale, float softcap, const std::optional<Floats1>& sinks, const Out2& out, int num_threads) {
    const int64_t width = row_bytes(Format::int8_group32, static_cast<int64_t>(queries.shape(1)));
    attend_in(Format::int8_group32, width, queries, keys, values, start, stop, scale, softcap, sinks, out, num_threads);
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
    m.def("dot_rows", &dot_rows, nb::arg("store").noconvert(), nb::arg("slots").noconvert(), "offset"_a, "length"_a,
          "format"_a, nb::arg("x").noconvert(), nb::arg("out").noconvert(), "num_threads"_a = 0, "activation_bits"_a = 0,
          "out[i] = store[slots[i], offset:] . x[length]");
    m.def("axpy_rows", &axpy_rows, nb::arg("store").noconvert(), nb::arg("slots").noconvert(), "offset"_a, "length"_a,
          "format"_a, nb::arg("coefficients").noconvert(), nb::arg("out").noconvert(), "num_threads"_a = 0,
          "out[length] = sum over i, in order, of coefficients[i] * store[slots[i], offset:]");
    m.def("mlp_rows", &mlp_rows, nb::arg("store").noconvert(), nb::arg("slots").noconvert(),
          nb::arg("gate").none(), nb::arg("up").none(), "down_offset"_a, "length"_a, "format"_a,
          "activation"_a, "threshold"_a, nb::arg("x").noconvert(),
          nb::arg("gate_bias").noconvert().none(), nb::arg("up_bias").noconvert().none(),
          nb::arg("factors").noconvert().none(), nb::arg("out").noconvert(), "num_threads"_a = 0,
          "activation_bits"_a = 0,
          "out[t, length] = sum over i of factors[t, i] * act(gate row i . x[t]) * act_up(up row i . x[t]) * down row i; "
          "gate and up = (offset, format)");
    m.def("mlp_blocks", &mlp_of_blocks, nb::arg("store").noconvert(), nb::arg("slots").noconvert(),
          nb::arg("gate").none(), nb::arg("up").none(), "down"_a, "block"_a, "length"_a, "activation"_a, "threshold"_a,
          nb::arg("x").noconvert(), nb::arg("gate_bias").noconvert().none(), nb::arg("up_bias").noconvert().none(),
          nb::arg("factors").noconvert().none(), nb::arg("out").noconvert(), "num_threads"_a = 0,
          "activation_bits"_a = 0,
          "mlp_rows of units of `block` neurons: their rows of gate, of up, and their part of each row of down; gate, up "
          "and down = (offset, format)");
    m.def("gemv", &gemv, nb::arg("matrix").noconvert(), "length"_a, "format"_a, nb::arg("x").noconvert(),
          nb::arg("out").noconvert(), "num_threads"_a = 0, "activation_bits"_a = 0, "out[i] = matrix[i] . x[length]");
    m.def("gemv_each", &gemv_each, nb::arg("matrix").noconvert(), "length"_a, "format"_a, nb::arg("x").noconvert(),
          nb::arg("out").noconvert(), "num_threads"_a = 0, "activation_bits"_a = 0,
          "out[t, i] = matrix[i] . x[t, length]");
    m.def("matmul", &matmul_rows, nb::arg("matrix").noconvert(), "length"_a, "format"_a, nb::arg("x").noconvert(),
          nb::arg("out").noconvert(), "num_threads"_a = 0, "out[t, i] = matrix[i] . x[t, length]; x of many vectors");
    m.def("matmul_t", &matmul_columns, nb::arg("matrix").noconvert(), "length"_a, "format"_a,
          nb::arg("c").noconvert(), nb::arg("out").noconvert(), "num_threads"_a = 0,
          "out[t, length] = sum over i of c[t, i] * matrix[i]");
    m.def("decode_rows", &decode_rows, nb::arg("matrix").noconvert(), "length"_a, "format"_a,
          nb::arg("out").noconvert(), "num_threads"_a = 0, "out[i, length] = matrix[i] as float32");
    m.def("read_through", &stream_words, nb::arg("words").noconvert(), "num_threads"_a = 0,
          "Reads memory from beginning to end, to measure how fast that is; the words' exclusive or.");
    m.def(
        "attend", &attend_rows, nb::arg("queries").noconvert(), nb::arg("keys").noconvert(),
        nb::arg("values").noconvert(), "start"_a, "stop"_a, "scale"_a, "softcap"_a, nb::arg("sinks").noconvert().none(),
        nb::arg("out").noconvert(), "num_threads"_a = 0,
        "out[heads, head_dim] = softmax(scale * queries . keys[start:stop]) . values[start:stop]; a positive softcap c "
        "makes c * tanh(s / c) of each score s; sinks[heads] count in the softmax and add nothing; keys and values are the "
        "bits of float16");
    m.def("attend_int8", &attend_int8, nb::arg("queries").noconvert(), nb::arg("keys").noconvert(),
          nb::arg("values").noconvert(), "start"_a, "stop"_a, "scale"_a, "softcap"_a,
          nb::arg("sinks").noconvert().none(), nb::arg("out").noconvert(), "num_threads"_a = 0, "attend with keys and values in int8_group32, [context, kv_heads, bytes]");
    m.def("encode_int8", &encode_heads, nb::arg("values").noconvert(), nb::arg("out").noconvert(),
          "out[token, head] = values[token, head] in int8_group32; the largest scale, with which out is whole if it is "
          "below 65520");
    m.def("best_intervals", &choose_intervals, nb::arg("gain").noconvert(), "price"_a, "read_units"_a, "edge_units"_a,
          "overlap"_a, "steps"_a, nb::arg("chosen").noconvert(),
          "chosen[token, unit]: the intervals with the most gain less price times the time of reads * read_units and "
          "units + reads * edge_units, which `overlap` (1: the larger, 0: their sum), among `steps` mixes of the two.");
}

}  // namespace coldpress
