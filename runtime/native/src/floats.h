// An array of zeros that is aligned to a cache line, so that no vector load touches two lines.
#pragma once

#include <cstdint>
#include <vector>

namespace coldpress {

class Floats {
   public:
    explicit Floats(int64_t count) : lines_(static_cast<size_t>((count + 15) / 16)) {}

    float* data() { return lines_.data()->values; }
    const float* data() const { return lines_.data()->values; }

   private:
    struct alignas(64) Line {
        float values[16];
    };
    std::vector<Line> lines_;
};

}  // namespace coldpress
