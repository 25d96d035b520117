// The batch script of a Slurm job that trains: `birkhoff train --ranks` as the supervisor of its
// ranks, with the handling of Slurm's signals and of the exit code. docs/slurm.md explains it.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "configs/schema/site.pb.h"

namespace birkhoff {

struct BatchJob {
  std::string name;
  std::string time;  // limit, as slurm_time() accepts it
  int nodes = 1;
  std::filesystem::path program;        // birkhoff
  std::filesystem::path work_folder;    // in which the configurations' relative paths start
  std::filesystem::path output_folder;  // receives job_output() of each job
  struct Run {
    std::filesystem::path config, folder;
  };
  std::vector<Run> runs;                    // several: an array job, with one element for each
  std::vector<std::string> train_options;   // "--ranks", "8", ...
  std::vector<std::string> doctor_options;  // the same for `doctor`, on all nodes
};

// All paths should be absolute. Every value is taken literally. Error(kUsage) about a value that a
// line of #SBATCH cannot express.
std::string batch_script(const BatchJob& job, const configs::Site& site);

// The file that a job's output goes to; job: "17", or "17_3" for an element of an array.
std::filesystem::path job_output(const std::filesystem::path& folder, const std::string& job);

// The file that says how a job ended, unless it goes back to the queue: "CODE text".
std::filesystem::path job_end(const std::filesystem::path& folder, const std::string& job);

// The text as one word of bash.
std::string shell_quoted(const std::string& text);

}  // namespace birkhoff
