// Which instructions our own loops use. Loops that are worth it are compiled for several sets and
// chosen at run time, all by instruction_set(). No LibTorch.
#pragma once

#include <string_view>

namespace birkhoff {

// From narrow to wide; each includes those before it. The last is AVX-512 with products of bf16.
enum class InstructionSet { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

// Whether this processor has the instructions.
bool is_supported(InstructionSet set);

// The set that loops use: the one that the environment variable BIRKHOFF_CPU names (portable, avx2,
// avx512 or avx512_bf16), else the widest that the processor supports. The same for the life of the
// process. The first call limits LibTorch, oneDNN and MKL to the set that the variable names, by
// environment variables of theirs that are not set yet; they read them when they first compute.
// Error(kUsage) if BIRKHOFF_CPU names no set, or one that the processor lacks.
InstructionSet instruction_set();

// As BIRKHOFF_CPU spells it.
std::string_view name_of(InstructionSet set);

}  // namespace birkhoff
