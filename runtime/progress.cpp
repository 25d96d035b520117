#include "runtime/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <string_view>

namespace birkhoff {
namespace {

constexpr int kBarCells = 16;
constexpr double kRedraw_s = 0.1;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::size_t terminal_columns(std::FILE* out) {
  winsize size{};
  return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
}

}  // namespace

std::string duration_text(double seconds) {
  const auto s = std::llround(std::max(seconds, 0.0));
  return s < 3600 ? fmt::format("{}:{:02}", s / 60, s % 60)
                  : fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

std::string progress_line(const StepReport& report, std::int64_t num_steps) {
  const double left_s = static_cast<double>(num_steps - report.step) * report.step_ms / 1000;
  // The most wanted first: a narrow terminal cuts the end.
  return fmt::format(
      "step {}/{}  loss {:.4f}  left {}  {:.0f} tokens/s  {:.1f} ms  lr {:.2e}  norm {:.3f}",
      report.step, num_steps, report.loss, duration_text(left_s), report.tokens_per_second,
      report.step_ms, report.learning_rate, report.grad_norm);
}

bool terminal_shows_bar() {
  const char* said = std::getenv("BIRKHOFF_PROGRESS");
  return isatty(STDERR_FILENO) == 1 || (said != nullptr && std::string_view(said) == "bar");
}

void ProgressBar::draw(const StepReport& report) {
  const double now = now_s();
  if (visible_ && now - last_drawn_s_ < kRedraw_s && report.step < num_steps_) return;
  last_drawn_s_ = now;
  visible_ = true;
  const auto filled = static_cast<std::size_t>(kBarCells * report.step / num_steps_);
  std::string line = fmt::format("[{:=<{}}{: <{}}] {}", "", filled, "", kBarCells - filled,
                                 progress_line(report, num_steps_));
  line.resize(std::min(line.size(), terminal_columns(out_) - 1));
  fmt::print(out_, "\r{}\x1b[K", line);  // \x1b[K: erase to the end of the line
  std::fflush(out_);
}

void ProgressBar::clear() {
  if (!visible_) return;
  std::fputs("\r\x1b[K", out_);
  std::fflush(out_);
  visible_ = false;
}

}  // namespace birkhoff
