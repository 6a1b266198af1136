// Float32 to the codes of int8_group32, to the bits of runtime/quantization/int8_group32.py.
#pragma once

#include <cstdint>

namespace coldpress {

// Encodes count rows of `length` values, one behind the other. Returns the largest scale before its rounding to half
// precision, not-a-number where a value is; a group whose scale is 65520 or more, or not a number, is left as it is.
float encode_int8(const float* values, int64_t count, int64_t length, uint8_t* out);

}  // namespace coldpress
