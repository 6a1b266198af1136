#include "kernels_blocks.h"

// Defines chunks, the blocks of a row that the inner loops take at a time, and the order of the values that they
// multiply: over an `Isa`, before kernels_body.h. Here a chunk is one block whose values keep their places; an
// instruction set that unpacks several blocks at once has a specialization. Blocks with a layout come in
// pieces of 256 values, which it only arranges. Everything is in an anonymous namespace.

namespace coldpress {
namespace {

template <Format F, int64_t kMembers>
struct PlainChunk {
    static constexpr int64_t kBlocks = kMembers, kValues = kBlocks * block_values(F);
    static constexpr int kVectors = static_cast<int>(kValues) / Isa::kWidth;

    // The values without their group's scale, possibly times constants that `arrange` divides by; and their scales.
    static void unpack(const uint8_t* chunk, V* values) { Isa::template unpack<F>(chunk, values); }
    static V scale(const uint8_t* chunk) { return Isa::template scale<F>(chunk); }
    // Stores a chunk's values of a vector in the order in which `unpack` returns their factors.
    static void arrange(const float* x, float* out) { __builtin_memcpy(out, x, kValues * sizeof(float)); }
    // The inverse.
    static void restore(const float* arranged, float* out) { arrange(arranged, out); }
};

template <Format F>
struct Chunk : PlainChunk<F, has_layout(F) ? kPiece / block_values(F) : 1> {};


template <Format F>
constexpr int64_t kChunkBytes = Chunk<F>::kBlocks * block_bytes(F);
template <Format F>
constexpr int64_t kChunkValues = Chunk<F>::kBlocks * block_values(F);

// Calls `step` with the index of each full chunk of a vector, and `last` with that of a partial chunk and its values.
template <Format F, typename Step, typename Last>
inline void over_values(int64_t length, const Step& step, const Last& last) {
    const int64_t whole = length / kChunkValues<F>, rest = length % kChunkValues<F>;
    for (int64_t c = 0; c < whole; ++c) step(c * kChunkValues<F>);
    if (rest > 0) last(whole * kChunkValues<F>, static_cast<size_t>(rest) * sizeof(float));
}

template <Format F>
void arrange_format(const float* x, int64_t length, float* out) {
    over_values<F>(
        length, [&](int64_t at) { Chunk<F>::arrange(x + at, out + at); },
        [&](int64_t at, size_t bytes) {
            float padded[kChunkValues<F>] = {};
            __builtin_memcpy(padded, x + at, bytes);
            Chunk<F>::arrange(padded, out + at);
        });
}

template <Format F>
void restore_format(const float* arranged, int64_t length, float* out) {
    over_values<F>(
        length, [&](int64_t at) { Chunk<F>::restore(arranged + at, out + at); },
        [&](int64_t at, size_t bytes) {
            float padded[kChunkValues<F>];
            Chunk<F>::restore(arranged + at, padded);
            __builtin_memcpy(out + at, padded, bytes);
        });
}

}  // namespace
}  // namespace coldpress
