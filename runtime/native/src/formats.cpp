#include "formats.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace coldpress {

Format format_of(const char* name) {
    if (std::strcmp(name, "fp16") == 0) return Format::fp16;
    if (std::strcmp(name, "int8_group32") == 0) return Format::int8_group32;
    if (std::strcmp(name, "int4_group32") == 0) return Format::int4_group32;
    throw std::invalid_argument("no native kernel reads the format '" + std::string(name) +
                                "'; there are kernels for fp16, int8_group32, int4_group32");
}

}  // namespace coldpress
