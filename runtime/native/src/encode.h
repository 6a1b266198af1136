// Encodes float32 values in int8_group32, with the same bits as runtime/quantization/int8_group32.py.
#pragma once

#include <cstdint>

namespace coldpress {

// Encodes `count` consecutive rows of `length` values. Returns the largest scale before rounding to half precision, or
// not-a-number if a value is; a group whose scale is 65520 or more, or not-a-number, is not written.
float encode_int8(const float* values, int64_t count, int64_t length, uint8_t* out);

}  // namespace coldpress
