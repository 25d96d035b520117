// How far a verb has come.
#pragma once

#include <chrono>
#include <ostream>
#include <string>

namespace birkhoff {

// On a terminal one line that rewrites itself, cut to its width; elsewhere a line every five
// seconds.
class ProgressLines {
 public:
  // err: leads to standard error, which decides.
  explicit ProgressLines(std::ostream& err);
  // Leaves nothing on a terminal.
  ~ProgressLines();
  ProgressLines(const ProgressLines&) = delete;
  ProgressLines& operator=(const ProgressLines&) = delete;

  // May be called as often as there is news: what comes too soon is not shown.
  void show(const std::string& line);

 private:
  using Clock = std::chrono::steady_clock;
  std::ostream& err_;
  const bool terminal_;
  Clock::time_point next_;
  bool open_ = false;
};

}  // namespace birkhoff
