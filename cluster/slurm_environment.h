// The Slurm job and step of this process.
#pragma once

#include <optional>
#include <string>

namespace birkhoff {

// "17", or "17_3" for an element of an array: one element also has the id of the whole array, with
// which Slurm's commands would act on all of them. nullopt outside of a job.
std::optional<std::string> slurm_job_id();

// The number of tasks in this process's step. nullopt outside of steps: also in the shell of an
// interactive salloc, and in a batch script, to which sbatch hands the variables of the step in
// which it was called.
std::optional<int> slurm_step_tasks();

}  // namespace birkhoff
