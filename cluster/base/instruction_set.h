// Which instructions our own loops use. Loops that are worth it are compiled for several sets and
// chosen at run time, all by instruction_set(). No LibTorch.
#pragma once

namespace birkhoff {

// From narrow to wide; each includes those before it. The last is AVX-512 with products of bf16.
enum class InstructionSet { kPortable, kAvx2, kAvx512, kAvx512Bf16 };

// Whether this processor has the instructions.
bool is_supported(InstructionSet set);

// The set that loops use: the one that the environment variable BIRKHOFF_CPU names (portable, avx2,
// avx512 or avx512_bf16), else the widest that the processor supports. The same for the life of the
// process. Error(kUsage) if the variable names no set, or one that the processor lacks.
InstructionSet instruction_set();

}  // namespace birkhoff
