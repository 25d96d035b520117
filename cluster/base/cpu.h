// The process as one that computes on CPUs.
#pragma once

namespace birkhoff {

// Makes LibTorch's operations run on `num_threads` threads, take fp32 matrix products from the
// faster of its two libraries, and find the memory that earlier tensors gave back still mapped. To
// be called before the first tensor is made. Local. Error(kUsage) if BIRKHOFF_CPU names no
// instruction set of this processor (instruction_set.h).
void compute_on_cpu(int num_threads);

// Cores in this process' affinity mask (what sbatch, taskset or a container allow), at least 1.
int usable_cores();
// Cores of the machine, at least 1.
int machine_cores();

}  // namespace birkhoff
