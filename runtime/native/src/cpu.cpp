#include "cpu.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace coldpress {
namespace {

#if defined(__x86_64__)
// Here and not beside VNNI's loops, whose source may use instructions that this machine lacks.
const Kernels& vnni_kernels() {
    static const Kernels found = [] {
        Kernels made = kAvx512Kernels;
        made.name = "avx512vnni";
        made.round = kVnniKernels.round;
        made.dot_rounded = kVnniKernels.dot_rounded;
        return made;
    }();
    return found;
}
#endif

std::vector<const Kernels*> tables() {
    std::vector<const Kernels*> found{&kPortableKernels};
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned a, b, c = 0, d;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    // __builtin_cpu_supports also checks that the operating system saves the wide registers.
    if (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        found.push_back(&kAvx2Kernels);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
            found.push_back(&kAvx512Kernels);
            if (__builtin_cpu_supports("avx512vnni")) found.push_back(&vnni_kernels());
        }
    }
#elif defined(__aarch64__)
    found.push_back(&kNeonKernels);
#endif
    return found;
}

bool has_crc_instructions() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
    return true;
#else
    return false;
#endif
}

const Kernels* current = &kPortableKernels;

}  // namespace

std::vector<std::string> available_cpus() {
    std::vector<std::string> names;
    for (const Kernels* table : tables()) names.emplace_back(table->name);
    return names;
}

void use_cpu(const std::string& name) {
    std::string known;
    for (const Kernels* table : tables()) {
        if (name == table->name) {
            current = table;
            return;
        }
        known += (known.empty() ? "" : ", ") + std::string(table->name);
    }
    throw std::invalid_argument("COLDPRESS_CPU '" + name + "' is not available on this machine; it has: " + known);
}

void choose_cpu() {
    const char* wanted = std::getenv("COLDPRESS_CPU");
    use_cpu(wanted && *wanted ? wanted : available_cpus().back());
}

const Kernels& kernels() { return *current; }

bool use_crc_instructions() {
    static const bool present = has_crc_instructions();
    return present && current != &kPortableKernels;
}

}  // namespace coldpress
