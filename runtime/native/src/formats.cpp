#include "formats.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace coldpress {

Format format_of(const char* name) {
    if (std::strcmp(name, "fp16") == 0) return Format::fp16;
    if (std::strcmp(name, "int8_group32") == 0) return Format::int8_group32;
    if (std::strcmp(name, "int4_group32") == 0) return Format::int4_group32;
    if (std::strcmp(name, "int3_group32") == 0) return Format::int3_group32;
    throw std::invalid_argument("no native kernel reads the format '" + std::string(name) +
                                "'; there are kernels for fp16, int8_group32, int4_group32, int3_group32");
}

Activation activation_of(const char* name) {
    constexpr struct {
        const char* name;
        Activation function;
    } known[] = {{"relu", Activation::relu},       {"drelu", Activation::relu}, {"relu2", Activation::relu2},
                 {"fatrelu", Activation::fatrelu}, {"silu", Activation::silu},  {"gelu", Activation::gelu},
                 {"gelu_tanh", Activation::gelu_tanh}};
    for (const auto& entry : known)
        if (std::strcmp(name, entry.name) == 0) return entry.function;
    throw std::invalid_argument("no native kernel computes the activation '" + std::string(name) +
                                "'; there are kernels for relu, drelu, relu2, fatrelu, silu, gelu, gelu_tanh");
}

}  // namespace coldpress
