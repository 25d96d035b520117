// Which Slurm job this process belongs to.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace birkhoff {

// "17", or "17_3" for an element of an array: one element also has the id of the whole array, with
// which Slurm's commands would act on all of them. nullopt outside of a job.
inline std::optional<std::string> slurm_job_id() {
  const char *array = std::getenv("SLURM_ARRAY_JOB_ID"), *task = std::getenv("SLURM_ARRAY_TASK_ID"),
             *job = std::getenv("SLURM_JOB_ID");
  if (array != nullptr && task != nullptr) return std::string(array) + "_" + task;
  return job == nullptr ? std::nullopt : std::optional<std::string>(job);
}

}  // namespace birkhoff
