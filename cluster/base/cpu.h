// Sets up the process for computing on the CPU.
#pragma once

#include <sched.h>

#include <cstddef>
#include <vector>

namespace birkhoff {

// Makes LibTorch run operations on `num_threads` threads, compute fp32 matrix products with the
// faster of its two libraries, and reuse the memory of freed tensors without mapping it again. Call
// it before the first tensor is created. Local. Error(kUsage) if BIRKHOFF_CPU names no instruction
// set of this CPU (instruction_set.h).
void compute_on_cpu(int num_threads);

// This process's affinity mask, as sbatch, taskset or a container set it; empty if the system does
// not tell.
cpu_set_t affinity_mask();
// Its cores, at least 1.
int usable_cores();
// How many cores process `which` of a machine should compute on: those of its mask, each divided by
// the number of processes whose masks have it; with an empty mask, its part of the machine. At
// least 1.
int share_of_cores(const std::vector<cpu_set_t>& masks, std::size_t which);
// Cores of the machine, at least 1.
int machine_cores();

}  // namespace birkhoff
