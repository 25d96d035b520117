#include "launcher/commands/progress_lines.h"

#include <unistd.h>

namespace birkhoff {
namespace {

constexpr std::chrono::milliseconds kRedraw{100}, kNextLine{5000};

// Control sequences of a terminal (VT100).
constexpr char kEraseLine[] = "\r\x1b[K";
constexpr char kCutLines[] = "\x1b[?7l", kWrapLines[] = "\x1b[?7h";

}  // namespace

ProgressLines::ProgressLines(std::ostream& err)
    : err_(err), terminal_(isatty(STDERR_FILENO) != 0), next_(Clock::now()) {
  if (!terminal_) next_ += kNextLine;
}

ProgressLines::~ProgressLines() {
  if (open_) err_ << kEraseLine << std::flush;
}

void ProgressLines::show(const std::string& line) {
  if (Clock::now() < next_) return;
  next_ = Clock::now() + (terminal_ ? kRedraw : kNextLine);
  if (terminal_) {
    err_ << kEraseLine << kCutLines << line << kWrapLines << std::flush;
    open_ = true;
  } else {
    err_ << line << std::endl;
  }
}

}  // namespace birkhoff
