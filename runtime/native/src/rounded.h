// The memory of a rounded vector (kernels.h).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace coldpress {

class RoundedVector {
   public:
    // Rounds x[length] to `bits`, 8 or 16, for rows of `format`, which is not fp16.
    RoundedVector(Format format, const float* x, int64_t length, int bits);

    const Rounded& view() const { return view_; }

   private:
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    std::vector<Line> memory_;
    Rounded view_;
};

}  // namespace coldpress
