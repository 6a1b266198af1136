// Attention of one query position over a key and value cache in fp16 or int8_group32.
#pragma once

#include <cstdint>

#include "formats.h"

namespace coldpress {

struct Attention {
    const float* queries;   // [heads, head_dim]
    const uint8_t* keys;    // [positions, kv_heads, head_dim] in `format`
    const uint8_t* values;  // the same
    Format format;
    int64_t heads, kv_heads, head_dim, positions;
    float scale;
    float softcap;  // scaled scores s become softcap * tanh(s / softcap); 0: they stay as they are
    const float* sinks;  // [heads], or null: scores that count in the softmax and add nothing
};

// out[heads, head_dim] = softmax(scale * queries . keys) . values; query heads share key heads in consecutive groups.
void attend(const Attention& a, float* out, int threads);

}  // namespace coldpress
