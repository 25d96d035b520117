// Small training runs of the real program, and the files they write.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "child.h"

namespace birkhoff {

// train.steps of tiny_training(): enough for a signal to arrive in the middle.
inline constexpr int kSteps = 300;

// Configuration of a model that takes milliseconds per step, on `corpus` in the working directory.
std::string tiny_training();

// Processes that train in the run folder, or run another command whose argument the folder is:
// ranks_of() returns the ranks that mpirun started, processes_of() all processes, with mpirun and
// supervisor.
std::vector<pid_t> ranks_of(const std::filesystem::path& run, const std::string& command = "train");
std::vector<pid_t> processes_of(const std::filesystem::path& run,
                                const std::string& command = "train");
// The mpirun that started its ranks; -1 if there is none.
pid_t mpirun_of(const std::filesystem::path& run);
// The process to which mpirun gave this rank. If there is none, fails the test and returns -1.
pid_t process_of_rank(const std::filesystem::path& run, int rank);
// Sends the signal to that process, if there is one.
void signal_rank(const std::filesystem::path& run, int rank, int signal);
void kill_all(const std::vector<pid_t>& processes);

// The last step in RUN/metrics.jsonl, 0 if there is none.
int last_step(const std::filesystem::path& run);
// Waits until the step is reached. Returns false if the child ends before, or after two minutes.
bool wait_for_step(Child& child, const std::filesystem::path& run, int step);
// Starts the run and calls `interrupt` when the step is reached. Returns the exit code. A run that
// ends well, because this process had no CPU in time, is put back and started again, up to five
// times; then returns 0.
int interrupt_at_step(const Command& command, const std::filesystem::path& run, int step,
                      const std::function<void(Child&)>& interrupt);
// Waits until the process has a handler for the signal. Returns false if it ends before, or after a
// minute.
bool wait_for_handler(Child& child, int signal);
// Waits until processes_of() is empty. Returns false after `limit`.
bool wait_until_none(const std::filesystem::path& run, std::chrono::seconds limit,
                     const std::string& command = "train");

// The files of parameters and optimizer state in the run's newest checkpoint: content by name.
std::map<std::string, std::string> final_state(const std::filesystem::path& run);
// All tensors in the run's newest checkpoint, assembled from the files that hold their parts: bytes
// by name.
std::map<std::string, std::string> final_tensors(const std::filesystem::path& run);
// Names of the run's checkpoint folders and of everything else in checkpoints/.
std::vector<std::string> checkpoint_names(const std::filesystem::path& run);

struct MetricsLines {
  std::vector<int> steps, evaluated;  // in the order of the file
  std::vector<std::string> figures;   // of each step: those that do not depend on the clock
  std::vector<double> losses;
};
// The keys of lines: a language model's, or a classifier's.
enum class Predicts { kText, kLabels };
// Fails the test on a line whose keys differ from the documented ones.
MetricsLines lines_of_metrics(const std::filesystem::path& run,
                              Predicts predicts = Predicts::kText);

// Why a text is not well-formed XML; empty if it is. Rejects comments and CDATA.
std::string xml_defect(const std::string& text);

}  // namespace birkhoff
