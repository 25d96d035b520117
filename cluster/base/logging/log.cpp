#include "cluster/base/logging/log.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>

#include "cluster/base/files/file.h"

namespace birkhoff {
namespace {

// The Log that main owns. A pointer, so that nothing is destroyed at exit, and global, so that no
// function needs a Log argument to log.
std::atomic<Log*> current_log = nullptr;

const char* level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "";
}

std::string format_line(int rank, LogLevel level, std::string_view text) {
  using std::chrono::system_clock;
  const auto now = system_clock::now();
  const std::time_t seconds = system_clock::to_time_t(now);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch());
  std::tm local{};
  ::localtime_r(&seconds, &local);
  char time[32];
  std::strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%S", &local);
  std::string line = fmt::format("{}.{:03} rank {} {}: {}", time, ms.count() % 1000, rank,
                                 level_name(level), text);
  std::replace(line.begin(), line.end(), '\n', ' ');  // one event, one line
  line += '\n';
  return line;
}

std::mutex terminal_mutex;
TerminalLine* terminal_line = nullptr;  // guarded by terminal_mutex

void write_stderr(const std::string& line) {
  const std::lock_guard lock(terminal_mutex);
  if (terminal_line != nullptr) terminal_line->erase();
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

void set_terminal_line(TerminalLine* line) {
  const std::lock_guard lock(terminal_mutex);
  terminal_line = line;
}

Log::Log(int rank) : rank_(rank) { current_log = this; }

Log::~Log() { current_log = nullptr; }

void Log::open(const std::string& path) {
  make_directory(parent_path(path));
  const std::lock_guard lock(mutex_);
  file_ = std::make_unique<File>(File::open_for_append(path));
}

void Log::write(LogLevel level, std::string_view text) {
  const std::string line = format_line(rank_, level, text);
  const std::lock_guard lock(mutex_);
  if (level != LogLevel::kInfo || rank_ == 0) write_stderr(line);
  append(line);
}

void Log::write_to_file(LogLevel level, std::string_view text) {
  const std::lock_guard lock(mutex_);
  append(format_line(rank_, level, text));
}

void Log::append(const std::string& line) {
  if (file_ == nullptr) return;
  try {
    file_->write_all(line);
  } catch (const Error& error) {
    file_.reset();
    write_stderr(format_line(rank_, LogLevel::kWarning,
                             fmt::format("no longer writing the log file: {}", error.what())));
  }
}

void log_text(LogLevel level, std::string_view text) {
  if (Log* log = current_log; log != nullptr) {
    log->write(level, text);
  } else {
    write_stderr(format_line(0, level, text));
  }
}

void log_to_file(LogLevel level, std::string_view text) {
  if (Log* log = current_log; log != nullptr) log->write_to_file(level, text);
}

}  // namespace birkhoff
