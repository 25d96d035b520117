// The progress of a subcommand.
#pragma once

#include <chrono>
#include <ostream>
#include <string>

namespace birkhoff {

// On a terminal, one line that is rewritten in place and cut to the terminal's width. Elsewhere, a
// line every five seconds.
class ProgressLines {
 public:
  // err: writes to standard error, which may or may not be a terminal.
  explicit ProgressLines(std::ostream& err);
  // Erases the line on a terminal.
  ~ProgressLines();
  ProgressLines(const ProgressLines&) = delete;
  ProgressLines& operator=(const ProgressLines&) = delete;

  // May be called at any rate: lines that come too soon are not shown.
  void show(const std::string& line);

 private:
  using Clock = std::chrono::steady_clock;
  std::ostream& err_;
  const bool terminal_;
  Clock::time_point next_;
  bool open_ = false;
};

}  // namespace birkhoff
