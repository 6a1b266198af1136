#include "rounded.h"

#include <algorithm>

#include "cpu.h"

namespace coldpress {

RoundedVector::RoundedVector(Format format, const float* x, int64_t length, int bits) {
    const int64_t blocks = blocks_of(length), room = (blocks + kRoundedBlocks - 1) / kRoundedBlocks * kRoundedBlocks;
    const int planes = bits / 8;
    const auto lines = [room](int64_t bytes_per_block) { return (room * bytes_per_block + 63) / 64; };
    const int64_t numbers = lines(kBlock), wide = lines(8 * 4);
    memory_.resize(static_cast<size_t>(planes * (numbers + wide) + wide));
    uint8_t* next = memory_.data()->bytes;
    const auto take = [&next](int64_t count) {
        uint8_t* taken = next;
        next += 64 * count;
        return taken;
    };
    view_ = {planes, {}, reinterpret_cast<float*>(take(wide)), {}};
    for (int plane = 0; plane < planes; ++plane) {
        view_.planes[plane] = reinterpret_cast<int8_t*>(take(numbers));
        view_.starts[plane] = reinterpret_cast<int32_t*>(take(wide));
    }
    std::vector<float> padded(static_cast<size_t>(blocks * kBlock));
    std::copy_n(x, length, padded.begin());
    kernels().round(format, padded.data(), blocks, view_);
}

}  // namespace coldpress
