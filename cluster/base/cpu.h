// Setup of the process for computing on the CPU, and the cores that it may use.
#pragma once

#include <sched.h>

#include <cstddef>
#include <vector>

namespace birkhoff {

// Makes LibTorch run operations on `num_threads` threads, compute fp32 matrix products with the
// faster of its two libraries, and reuse the memory of freed tensors without mapping it again.
// Tensors are in huge pages where the system has them. Call it before the first tensor is created.
// Local. Error(kUsage) if BIRKHOFF_CPU names no instruction set of this CPU (instruction_set.h).
void compute_on_cpu(int num_threads);

// This process's affinity mask, as sbatch, taskset or a container set it; empty if the system does
// not report it.
cpu_set_t affinity_mask();
// The number of cores in the mask, at least 1.
int usable_cores();
// The number of cores on which process `which` of a machine should compute: the cores of its mask,
// each divided by the number of processes whose masks contain it; with an empty mask, its share of
// the machine. At least 1.
int share_of_cores(const std::vector<cpu_set_t>& masks, std::size_t which);
// The number of cores of the machine, at least 1.
int machine_cores();

}  // namespace birkhoff
