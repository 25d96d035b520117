// Small training runs of the real program, and what they leave.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "child.h"

namespace birkhoff {

// train.steps of tiny_training(): enough that a signal comes in the middle.
inline constexpr int kSteps = 300;

// A model that takes milliseconds a step, on `corpus` in the working directory.
std::string tiny_training();

// Processes that train in the run folder: its ranks, as far as mpirun started them, and all with
// mpirun and supervisor.
std::vector<pid_t> ranks_of(const std::filesystem::path& run);
std::vector<pid_t> processes_of(const std::filesystem::path& run);
// The mpirun that started its ranks; -1 if there is none.
pid_t mpirun_of(const std::filesystem::path& run);
// The process that mpirun gave this number; -1, and the test has failed, if there is none.
pid_t process_of_rank(const std::filesystem::path& run, int rank);
// To that process, if there is one.
void signal_rank(const std::filesystem::path& run, int rank, int signal);
void kill_all(const std::vector<pid_t>& processes);

// The last step in RUN/metrics.jsonl, 0 where there is none.
int last_step(const std::filesystem::path& run);
// Waits until the step is reached. False if the child ended before, or two minutes passed.
bool wait_for_step(Child& child, const std::filesystem::path& run, int step);
// Waits until the process has a handler for the signal. False if it ended before, or in a minute.
bool wait_for_handler(Child& child, int signal);
// Waits until nothing trains in the folder. False after `limit`.
bool wait_until_none(const std::filesystem::path& run, std::chrono::seconds limit);

// Content by file name of parameters and optimizer state in the run's newest checkpoint.
std::map<std::string, std::string> final_state(const std::filesystem::path& run);
// Bytes by name of all tensors in the run's newest checkpoint, put together from however many files
// hold their parts.
std::map<std::string, std::string> final_tensors(const std::filesystem::path& run);
// Names of the run's checkpoint folders and of all else in checkpoints/.
std::vector<std::string> checkpoint_names(const std::filesystem::path& run);

struct MetricsLines {
  std::vector<int> steps, evaluated;  // in the order of the file
  std::vector<std::string> figures;   // of each step: what does not depend on the clock
  std::vector<double> losses;
};
// Fails the test on a line that has other keys than documented.
MetricsLines lines_of_metrics(const std::filesystem::path& run);

// What keeps a text from being well-formed XML, or empty. No comments, no CDATA.
std::string xml_defect(const std::string& text);

}  // namespace birkhoff
