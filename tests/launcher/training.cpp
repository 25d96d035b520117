#include "training.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

std::string content(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// The arguments of a process, each ended by a zero byte.
std::string arguments_of(pid_t pid) { return content("/proc/" + std::to_string(pid) + "/cmdline"); }

// As an argument of its own, or as the value of an option.
bool holds_argument(const std::string& arguments, const std::string& argument) {
  const std::string all = '\0' + arguments;
  return all.find('\0' + argument + '\0') != std::string::npos ||
         all.find('=' + argument + '\0') != std::string::npos;
}

bool is_zombie(pid_t pid) {
  const std::string stat = content("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t name_end = stat.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= stat.size() || stat[name_end + 2] == 'Z';
}

template <typename Condition>
bool wait_until(Condition condition, std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

// The rank that mpirun gave to a process; -1 if it gave none.
int rank_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/environ", std::ios::binary);
  for (std::string variable; std::getline(file, variable, '\0');) {
    const std::string name = "OMPI_COMM_WORLD_RANK=";
    if (variable.rfind(name, 0) == 0) return std::stoi(variable.substr(name.size()));
  }
  return -1;
}

// Throws if there is none.
fs::path newest_checkpoint(const fs::path& run) {
  const std::vector<std::string> names = checkpoint_names(run);
  if (names.empty()) throw std::runtime_error(run.string() + " has no checkpoint");
  return run / "checkpoints" / names.back();
}

}  // namespace

std::string tiny_training() {
  return R"(task { language_model {} }
data { corpus: "corpus" sequence_length: 32 }
model {
  layers: 1
  channels: 16
  heads: 2
  attention { group { mechanism { sinkhorn { block: 8 } } } }
  dropout { residual: 0.1 }
}
train {
  steps: )" +
         std::to_string(kSteps) +
         R"(
  global_batch: 6
  schedule { warmup_steps: 10 }
}
checkpoint { every: 50 }
evaluate { every: 100 micro_batch: 8 }
metrics { every: 1 }
)";
}

std::vector<pid_t> processes_of(const fs::path& run, const std::string& command) {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const pid_t pid = std::stoi(name);
    const std::string arguments = arguments_of(pid);
    if (!holds_argument(arguments, run.string()) || !holds_argument(arguments, command)) continue;
    // Other tests run at the same time, with runs of this name in working directories of their own.
    std::error_code gone;
    const fs::path directory = fs::read_symlink(entry.path() / "cwd", gone);
    if (run.is_relative() && directory != fs::current_path()) continue;
    if (!is_zombie(pid)) found.push_back(pid);
  }
  return found;
}

std::vector<pid_t> ranks_of(const fs::path& run, const std::string& command) {
  std::vector<pid_t> found;
  for (const pid_t pid : processes_of(run, command)) {
    if (rank_of(pid) >= 0) found.push_back(pid);
  }
  return found;
}

pid_t process_of_rank(const fs::path& run, int rank) {
  for (const pid_t pid : ranks_of(run)) {
    if (rank_of(pid) == rank) return pid;
  }
  ADD_FAILURE() << "no rank " << rank << " in " << run;
  return -1;
}

void signal_rank(const fs::path& run, int rank, int signal) {
  const pid_t pid = process_of_rank(run, rank);
  if (pid > 0) kill(pid, signal);  // -1 would mean every process
}

pid_t mpirun_of(const fs::path& run) {
  for (const pid_t pid : processes_of(run)) {
    const std::string arguments = arguments_of(pid);
    if (fs::path(arguments.substr(0, arguments.find('\0'))).filename() == "mpirun") return pid;
  }
  return -1;
}

void kill_all(const std::vector<pid_t>& processes) {
  for (const pid_t pid : processes) {
    if (pid > 0) kill(pid, SIGKILL);
  }
}

int last_step(const fs::path& run) {
  constexpr std::streamoff kTailBytes = 4096;  // only the newest lines, because tests read often
  std::ifstream lines(run / "metrics.jsonl", std::ios::ate);
  lines.seekg(std::max<std::streamoff>(0, lines.tellg() - kTailBytes));
  int step = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto json = ordered_json::parse(
        // the first and the last line may be incomplete
        line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.contains("step")) step = std::max(step, json["step"].get<int>());
  }
  return step;
}

bool wait_for_step(Child& child, const fs::path& run, int step) {
  wait_until([&] { return last_step(run) >= step || !child.is_running(); },
             std::chrono::seconds(120));
  return last_step(run) >= step && child.is_running();
}

int interrupt_at_step(const Command& command, const fs::path& run, int step,
                      const std::function<void(Child&)>& interrupt) {
  const fs::path before = run.string() + ".before";
  for (int attempt = 0; attempt < 5; ++attempt) {
    fs::remove_all(before);
    if (fs::exists(run)) fs::copy(run, before, fs::copy_options::recursive);
    Child child(command);
    if (wait_for_step(child, run, step)) interrupt(child);
    if (const int code = child.finish().code; code != 0) return code;
    fs::remove_all(run);
    if (fs::exists(before)) fs::rename(before, run);
  }
  return 0;
}

bool wait_for_handler(Child& child, int signal) {
  const auto caught = [&] {
    std::ifstream status("/proc/" + std::to_string(child.pid()) + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("SigCgt:", 0) == 0) {
        return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
      }
    }
    return false;
  };
  wait_until([&] { return caught() || !child.is_running(); }, std::chrono::seconds(60));
  return caught();
}

bool wait_until_none(const fs::path& run, std::chrono::seconds limit, const std::string& command) {
  return wait_until([&] { return processes_of(run, command).empty(); }, limit);
}

std::vector<std::string> checkpoint_names(const fs::path& run) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints"))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::map<std::string, std::string> final_state(const fs::path& run) {
  std::map<std::string, std::string> state;
  for (const auto& entry : fs::directory_iterator(newest_checkpoint(run))) {
    if (entry.path().extension() == ".safetensors")
      state[entry.path().filename().string()] = content(entry.path());
  }
  return state;
}

std::map<std::string, std::string> final_tensors(const fs::path& run) {
  const fs::path folder = newest_checkpoint(run);
  std::map<std::string, std::map<std::int64_t, std::string>> parts;  // by name and place
  const ordered_json manifest = ordered_json::parse(content(folder / "manifest.json"));
  for (const auto& tensor : manifest.at("tensor")) {
    const std::string file = content(folder / tensor.at("file").get<std::string>());
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
    const auto header = ordered_json::parse(file.substr(8, header_bytes));
    const auto& offsets = header.at(tensor.at("key").get<std::string>()).at("data_offsets");
    const std::size_t begin = offsets[0], end = offsets[1];
    parts[tensor.at("name")][std::stoll(tensor.at("flat_begin").get<std::string>())] =
        file.substr(8 + header_bytes + begin, end - begin);
  }
  std::map<std::string, std::string> tensors;
  for (const auto& [name, by_place] : parts) {
    for (const auto& [place, bytes] : by_place) tensors[name] += bytes;
  }
  return tensors;
}

MetricsLines lines_of_metrics(const fs::path& run, Predicts predicts) {
  using Keys = std::vector<std::string>;
  const bool text = predicts == Predicts::kText;
  const Keys evaluation_keys =
      text ? Keys{"step", "split", "loss", "bits_per_byte", "tokens", "bytes", "elapsed_seconds"}
           : Keys{"step", "split", "loss", "macro_f1", "tokens", "elapsed_seconds", "accuracy"};
  Keys step_keys = {"step",           "loss",          "tokens",    "tokens_per_second", "step_ms",
                    "loader_wait_ms", "learning_rate", "grad_norm", "elapsed_seconds"};
  if (!text) step_keys.emplace_back("accuracy");
  MetricsLines metrics;
  double elapsed_seconds = 0;
  std::map<bool, std::optional<Keys>> of_mechanisms;  // of evaluations, and of steps
  std::ifstream lines(run / "metrics.jsonl");
  for (std::string line; std::getline(lines, line);) {
    const ordered_json json = ordered_json::parse(line);
    Keys keys, figures_of_mechanisms;
    for (const auto& [key, value] : json.items()) {
      (key.starts_with("blocks.") ? figures_of_mechanisms : keys).push_back(key);
    }
    std::optional<Keys>& expected = of_mechanisms[json.contains("split")];
    if (!expected) expected = figures_of_mechanisms;
    EXPECT_EQ(figures_of_mechanisms, *expected) << "all lines of a kind have the same figures";
    if (json.contains("split")) {
      EXPECT_EQ(keys, evaluation_keys);
      metrics.evaluated.push_back(json["step"].get<int>());
      continue;
    }
    EXPECT_EQ(keys, step_keys);
    metrics.steps.push_back(json["step"].get<int>());
    metrics.losses.push_back(json["loss"].get<double>());
    EXPECT_GE(json["loader_wait_ms"].get<double>(), 0);
    EXPECT_GE(json["elapsed_seconds"].get<double>(), elapsed_seconds) << "it never goes back";
    elapsed_seconds = json["elapsed_seconds"].get<double>();
    ordered_json figures = json;
    figures.erase("tokens_per_second");
    figures.erase("step_ms");
    figures.erase("loader_wait_ms");
    figures.erase("elapsed_seconds");
    metrics.figures.push_back(figures.dump());
  }
  return metrics;
}

std::string xml_defect(const std::string& text) {
  std::vector<std::string> open;
  bool had_root = false;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '&') {
      const std::size_t end = text.find(';', at);
      if (end == std::string::npos || end - at > 8) return "a bare & at " + std::to_string(at);
    }
    if (text[at] != '<') {
      if (open.empty() && !std::isspace(static_cast<unsigned char>(text[at])))
        return "text outside the root at " + std::to_string(at);
      ++at;
      continue;
    }
    const std::size_t end = text.find('>', at);
    if (end == std::string::npos) return "a tag without an end at " + std::to_string(at);
    const std::string tag = text.substr(at + 1, end - at - 1);
    at = end + 1;
    if (tag.empty() || tag.find('<') != std::string::npos) return "a bad tag <" + tag + ">";
    if (tag.front() == '?') continue;
    if (std::count(tag.begin(), tag.end(), '"') % 2 != 0) return "an open quote in <" + tag + ">";
    if (tag.front() == '/') {
      if (open.empty() || open.back() != tag.substr(1))
        return "</" + tag.substr(1) + "> closes nothing";
      open.pop_back();
      continue;
    }
    if (open.empty() && had_root) return "a second root";
    had_root = true;
    if (tag.back() != '/') open.push_back(tag.substr(0, tag.find_first_of(" \n\t")));
  }
  if (!open.empty()) return "<" + open.back() + "> is not closed";
  return had_root ? "" : "no element";
}

}  // namespace birkhoff
