// The instruction set of our own loops. Loops that benefit are compiled for several sets;
// instruction_set() chooses one for all of them at run time. No LibTorch.
#pragma once

#include <string_view>

namespace birkhoff {

// From narrow to wide; each includes those before it. kAvx512Bf16 multiplies vectors of bf16,
// kAmxBf16 also matrices of bf16.
enum class InstructionSet { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

// True if this CPU has the instructions. For kAmxBf16 it also asks Linux for the permission to use
// AMX's registers, which the process then keeps.
bool is_supported(InstructionSet set);

// The set that loops use: the one that the environment variable BIRKHOFF_CPU names (portable, avx2,
// avx512, avx512_bf16 or amx_bf16), or else the widest that the CPU supports. It never changes
// within a process. If BIRKHOFF_CPU is set, the first call also limits LibTorch, oneDNN and MKL to
// that set: it sets their environment variables, except those that are set already, and they read
// them when they first compute. Error(kUsage) if BIRKHOFF_CPU names no set, or one that the CPU
// lacks.
InstructionSet instruction_set();

// The name as BIRKHOFF_CPU spells it.
std::string_view name_of(InstructionSet set);

}  // namespace birkhoff
