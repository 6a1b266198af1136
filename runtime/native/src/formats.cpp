#include "formats.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace coldpress {

Format format_of(const char* name) {
    constexpr struct {
        const char* name;
        Format format;
    } known[] = {{"fp16", Format::fp16},
                 {"int8_group32", Format::int8_group32},
                 {"int4_group32", Format::int4_group32},
                 {"q8_0", Format::int8_group32},
                 {"q4_0", Format::int4_group32},
                 {"q4_k", Format::q4_k},
                 {"q4_1", Format::q4_1},
                 {"q6_k", Format::q6_k},
                 {"q5_k", Format::q5_k},
                 {"q5_0", Format::q5_0},
                 {"q5_1", Format::q5_1},
                 {"iq4_nl", Format::iq4_nl},
                 {"q3_k", Format::q3_k},
                 {"q2_k", Format::q2_k}};
    std::string names;
    for (const auto& entry : known) {
        if (std::strcmp(name, entry.name) == 0) return entry.format;
        names += (names.empty() ? "" : ", ") + std::string(entry.name);
    }
    throw std::invalid_argument("no native kernel reads the format '" + std::string(name) + "'; there are kernels for " +
                                names);
}

Activation activation_of(const char* name) {
    constexpr struct {
        const char* name;
        Activation function;
    } known[] = {{"relu", Activation::relu},       {"drelu", Activation::relu}, {"relu2", Activation::relu2},
                 {"fatrelu", Activation::fatrelu}, {"silu", Activation::silu},  {"gelu", Activation::gelu},
                 {"gelu_tanh", Activation::gelu_tanh}, {"swiglu_oai", Activation::clamped_swish}};
    for (const auto& entry : known)
        if (std::strcmp(name, entry.name) == 0) return entry.function;
    throw std::invalid_argument("no native kernel computes the activation '" + std::string(name) +
                                "'; there are kernels for relu, drelu, relu2, fatrelu, silu, gelu, gelu_tanh, swiglu_oai");
}

Activation up_activation_of(const char* name) {
    if (std::strcmp(name, "drelu") == 0) return Activation::relu;
    return std::strcmp(name, "swiglu_oai") == 0 ? Activation::clamped_up : Activation::none;
}

}  // namespace coldpress
