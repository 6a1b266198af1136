// Selects the instruction set: the best one that this machine has, or the one that COLDPRESS_CPU names.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace coldpress {

// The names that this machine can run, from slowest ("portable") to fastest.
std::vector<std::string> available_cpus();

// Switches to `name`. Throws std::invalid_argument, listing available_cpus(), for any other name.
void use_cpu(const std::string& name);

// Switches to COLDPRESS_CPU if it is set and not empty, else to the fastest set.
void choose_cpu();

const Kernels& kernels();

// Whether this machine has CRC32C instructions and the path in use may use them: `portable` does not.
bool use_crc_instructions();

}  // namespace coldpress
