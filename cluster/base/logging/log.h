// The log has one line per event: local time, rank, level, text. Lines go to stderr (information
// from rank 0 only, warnings and errors from every rank) and, once it is opened, to this rank's log
// file in the run folder (everything).
#pragma once

#include <fmt/core.h>

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace birkhoff {

class File;

// A line that a program redraws at the end of a terminal. The log erases it before it writes a line
// to stderr, so that the two do not mix.
class TerminalLine {
 public:
  virtual ~TerminalLine() = default;
  // Any thread may call it.
  virtual void erase() = 0;
};
// The line to erase from now on; null: none. At most one exists at a time.
void set_terminal_line(TerminalLine* line);

enum class LogLevel { kInfo, kWarning, kError };

// Owned by main; at most one exists at a time. While it exists, log_info() and the other functions
// write to it. Without a Log they write to stderr as rank 0, so that libraries and tests may log at
// any time.
class Log {
 public:
  explicit Log(int rank);
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  // From now on also appends to this file (RUN/log/rank-N.log). Creates its folder.
  void open(const std::string& path);
  // Thread-safe. If the log file cannot be written, writes one warning and stops using the file: a
  // full disk must not end a run here.
  void write(LogLevel level, std::string_view text);
  // Writes to the file only: for an error that ends the program, which main prints to stderr.
  void write_to_file(LogLevel level, std::string_view text);

 private:
  void append(const std::string& line);

  const int rank_;
  std::mutex mutex_;
  std::unique_ptr<File> file_;
};

void log_text(LogLevel level, std::string_view text);
// Writes only to the file of the current Log, if there is one: for text that stderr shows in
// another form.
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
