#include "runtime/reporting/progress.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "cluster/base/files/file.h"
#include "cluster/base/text/number_text.h"

namespace birkhoff {
namespace {

constexpr int kBarCells = 16;
constexpr std::size_t kColumnsOfBar = 60;  // a narrower terminal shows only figures
constexpr double kRedrawSeconds = 0.1;

// 0: not a terminal, or one that does not report its width.
std::size_t columns_of(int fd) {
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

// The width of the terminal that `out` leads to: `out` itself or, if mpirun's pipes lie between,
// the terminal that the job was started from.
std::size_t terminal_columns(std::FILE* out) {
  constexpr std::size_t kUsual = 80;
  std::size_t columns = columns_of(fileno(out));
  if (columns == 0) {
    const UniqueHandle<FileDescriptorTraits> terminal(
        open("/dev/tty", O_RDONLY | O_NOCTTY | O_CLOEXEC));
    if (terminal.get() >= 0) columns = columns_of(terminal.get());
  }
  return columns > 1 ? columns : kUsual;
}

}  // namespace

StepReport StepMeans::add(const StepReport& step, std::int64_t step_tokens) {
  ++steps_;
  tokens_ += step_tokens;
  ms_ += step.step_ms;
  wait_ms_ += step.loader_wait_ms;
  StepReport report = step;
  report.step_ms = ms_ / static_cast<double>(steps_);
  report.loader_wait_ms = wait_ms_ / static_cast<double>(steps_);
  report.tokens_per_second = 1000 * static_cast<double>(tokens_) / ms_;
  return report;
}

double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool is_line_due(std::int64_t step, std::int64_t every, std::int64_t num_steps) {
  return step % every == 0 || step == num_steps;
}

std::string duration_text(double seconds) {
  const auto s = std::llround(std::max(seconds, 0.0));
  return s < 3600 ? fmt::format("{}:{:02}", s / 60, s % 60)
                  : fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

std::string progress_line(const StepReport& report, std::int64_t num_steps) {
  const double left_s = static_cast<double>(num_steps - report.step) * report.step_ms / 1000;
  // The most important figures first: a narrow terminal cuts off the end.
  const std::string loss = report.loss ? "loss " + fixed_text(*report.loss, 4) : "no targets";
  return fmt::format("step {}/{}  {}  left {}  {:.0f} tokens/s  {:.1f} ms  lr {:.2e}  norm {}",
                     report.step, num_steps, loss, duration_text(left_s), report.tokens_per_second,
                     report.step_ms, report.learning_rate, fixed_text(report.grad_norm, 3));
}

bool terminal_shows_bar() {
  const char* said = std::getenv("BIRKHOFF_PROGRESS");
  return isatty(STDERR_FILENO) == 1 || (said != nullptr && std::string_view(said) == "bar");
}

ProgressBar::ProgressBar(std::FILE* out, std::int64_t num_steps)
    : out_(out), num_steps_(num_steps) {
  set_terminal_line(this);
}

ProgressBar::~ProgressBar() { set_terminal_line(nullptr); }

void ProgressBar::draw(const StepReport& report) {
  const std::lock_guard lock(mutex_);
  const double now = clock_seconds();
  if (visible_ && now - last_drawn_s_ < kRedrawSeconds && report.step < num_steps_) return;
  last_drawn_s_ = now;
  visible_ = true;
  const std::size_t columns = terminal_columns(out_);
  std::string line = progress_line(report, num_steps_);
  if (columns >= kColumnsOfBar) {
    const auto filled = static_cast<std::size_t>(kBarCells * report.step / num_steps_);
    line = fmt::format("[{:=<{}}{: <{}}] {}", "", filled, "", kBarCells - filled, line);
  }
  line.resize(std::min(line.size(), columns - 1));
  fmt::print(out_, "\r{}\x1b[K", line);  // \x1b[K: erase to the end of the line
  std::fflush(out_);
}

void ProgressBar::erase() {
  const std::lock_guard lock(mutex_);
  if (!visible_) return;
  std::fputs("\r\x1b[K", out_);
  std::fflush(out_);
  visible_ = false;
}

}  // namespace birkhoff
