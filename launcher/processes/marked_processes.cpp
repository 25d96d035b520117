#include "launcher/processes/marked_processes.h"

#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

// False for a process that has ended, reaped or not, or that belongs to another user: its variables
// cannot be read.
bool was_started_with(pid_t process, const std::string& variable) {
  std::ifstream environment("/proc/" + std::to_string(process) + "/environ", std::ios::binary);
  for (std::string entry; std::getline(environment, entry, '\0');) {
    if (entry == variable) return true;
  }
  return false;
}

std::vector<pid_t> marked_processes(const std::string& variable) {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    pid_t process = 0;
    const char* const name_end = name.data() + name.size();
    if (std::from_chars(name.data(), name_end, process).ptr != name_end) continue;
    if (process != getpid() && was_started_with(process, variable)) found.push_back(process);
  }
  return found;
}

}  // namespace

std::vector<pid_t> end_marked_processes(const std::string& variable) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point give_up = Clock::now() + std::chrono::seconds(10);
  for (;;) {
    const std::vector<pid_t> left = marked_processes(variable);
    for (const pid_t process : left) kill(process, SIGKILL);
    if (left.empty() || Clock::now() > give_up) return left;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace birkhoff
