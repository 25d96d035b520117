#include "cluster/slurm_environment.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string_view>

#include "cluster/base/text/number_text.h"

namespace birkhoff {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

pid_t parent_of(pid_t process) {
  const std::string stat = first_line("/proc/" + std::to_string(process) + "/stat");
  // The name, in parentheses, may hold spaces; the parent is the second field after it.
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos || name_end + 4 > stat.size()) return 0;
  pid_t parent = 0;
  std::from_chars(stat.data() + name_end + 4, stat.data() + stat.size(), parent);
  return parent;
}

// Slurm's own process above this one is called "slurmstepd: [17.batch]" in a batch script.
bool is_in_batch_script() {
  for (pid_t process = getppid(); process > 1; process = parent_of(process)) {
    const std::string title = first_line("/proc/" + std::to_string(process) + "/cmdline");
    if (title.starts_with("slurmstepd: [")) return title.find(".batch]") != std::string::npos;
  }
  return false;
}

}  // namespace

std::optional<std::string> slurm_job_id() {
  const char *array = std::getenv("SLURM_ARRAY_JOB_ID"), *task = std::getenv("SLURM_ARRAY_TASK_ID"),
             *job = std::getenv("SLURM_JOB_ID");
  if (array != nullptr && task != nullptr) return std::string(array) + "_" + task;
  return job == nullptr ? std::nullopt : std::optional<std::string>(job);
}

std::optional<int> slurm_step_tasks() {
  constexpr std::string_view kInteractiveStep = "4294967290";
  const char *tasks = std::getenv("SLURM_STEP_NUM_TASKS"), *step = std::getenv("SLURM_STEP_ID");
  if (tasks == nullptr || (step != nullptr && step == kInteractiveStep)) return std::nullopt;
  return is_in_batch_script() ? std::nullopt : parse_number<int>(tasks);
}

}  // namespace birkhoff
