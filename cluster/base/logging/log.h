// One line per event: local time, rank, level, text. To stderr (information from rank 0 only,
// warnings and errors from every rank) and, once opened, to the run's log file of this rank
// (everything).
#pragma once

#include <fmt/core.h>

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace birkhoff {

class File;

enum class LogLevel { kInfo, kWarning, kError };

// Owned by main. While it lives it is where log_info() and the others go; one at a time. Without
// one they write to stderr as rank 0, so that libraries and tests may log at any time.
class Log {
 public:
  explicit Log(int rank);
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  // Appends to the file from now on (RUN/log/rank-N.log); its folder is made.
  void open(const std::string& path);
  // Thread-safe. A log file that cannot be written is given up with one warning: a full disk must
  // not end a run here.
  void write(LogLevel level, std::string_view text);
  // To the file only: for an error that ends the program, which main tells on stderr.
  void write_to_file(LogLevel level, std::string_view text);

 private:
  void append(const std::string& line);

  const int rank_;
  std::mutex mutex_;
  std::unique_ptr<File> file_;
};

void log_text(LogLevel level, std::string_view text);
// To the file of the current log only, if it has one: what stderr shows in another form.
void log_to_file(LogLevel level, std::string_view text);

template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_text(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log_text(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace birkhoff
