// Sets up the process for computing on the CPU.
#pragma once

namespace birkhoff {

// Makes LibTorch run operations on `num_threads` threads, compute fp32 matrix products with the
// faster of its two libraries, and reuse the memory of freed tensors without mapping it again. Call
// it before the first tensor is created. Local. Error(kUsage) if BIRKHOFF_CPU names no instruction
// set of this CPU (instruction_set.h).
void compute_on_cpu(int num_threads);

// Cores in this process's affinity mask (as sbatch, taskset or a container set it), at least 1.
int usable_cores();
// Cores of the machine, at least 1.
int machine_cores();

}  // namespace birkhoff
