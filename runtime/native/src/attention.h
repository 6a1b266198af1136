// Attention of one query position over the fp16 key and value cache.
#pragma once

#include <cstdint>

namespace coldpress {

struct Attention {
    const float* queries;   // [heads, head_dim]
    const uint8_t* keys;    // fp16 [positions, kv_heads, head_dim]
    const uint8_t* values;  // fp16 [positions, kv_heads, head_dim]
    int64_t heads, kv_heads, head_dim, positions;
    float scale;
};

// out[heads, head_dim] = softmax(scale * queries . keys) . values; query heads share key heads in consecutive groups.
void attend(const Attention& a, float* out, int threads);

}  // namespace coldpress
