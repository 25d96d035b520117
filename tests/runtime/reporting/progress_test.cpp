#include "runtime/reporting/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#include "cluster/base/logging/log.h"
#include "cluster/base/text/utf8.h"
#include "tests/runtime/reporting/reports.h"

namespace birkhoff {
namespace {

TEST(Progress, NaNHasNoSign) {
  StepReport report = report_at(3, -std::numeric_limits<double>::quiet_NaN());
  report.grad_norm = -std::numeric_limits<double>::quiet_NaN();
  const std::string line = progress_line(report, 10);
  EXPECT_NE(line.find("loss nan "), std::string::npos) << line;
  EXPECT_TRUE(line.ends_with("norm nan")) << line;
}

TEST(Progress, TextsAreReadable) {
  EXPECT_EQ(duration_text(0), "0:00");
  EXPECT_EQ(duration_text(59.6), "1:00");
  EXPECT_EQ(duration_text(3723), "1:02:03");
  StepReport report = report_at(100, 2.34567);
  report.tokens_per_second = 12345.4;
  EXPECT_EQ(
      progress_line(report, 2000),
      "step 100/2000  loss 2.3457  left 1:35  12345 tokens/s  50.0 ms  lr 1.00e-03  norm 0.500");
}

TEST(Progress, TheSupervisorMaySpeakForItsTerminal) {
  ASSERT_EQ(setenv("BIRKHOFF_PROGRESS", "bar", 1), 0);
  EXPECT_TRUE(terminal_shows_bar());
  ASSERT_EQ(unsetenv("BIRKHOFF_PROGRESS"), 0);
  EXPECT_EQ(terminal_shows_bar(), isatty(STDERR_FILENO) == 1);
}

TEST(Progress, TheBarRewritesOneLineAndLeavesNothingBehind) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::tmpfile(), std::fclose);
  ProgressBar bar(out.get(), 10);
  bar.erase();
  EXPECT_EQ(std::ftell(out.get()), 0);  // nothing was drawn, nothing to remove
  bar.draw(report_at(5, 2));
  bar.draw(report_at(6, 2));  // within 0.1 s: not redrawn
  bar.draw(report_at(10, 2));
  bar.erase();
  ASSERT_EQ(std::fseek(out.get(), 0, SEEK_SET), 0);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), out.get()));
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_NE(text.find("[========        ] step 5/10"), std::string::npos) << text;
  EXPECT_EQ(text.find("step 6/10"), std::string::npos);
  EXPECT_NE(text.find("[================] step 10/10"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("\r\x1b[K"));
  for (std::size_t begin = 0, end = 0; (end = text.find("\x1b[K", begin)) != std::string::npos;
       begin = end + 3) {
    EXPECT_LE(end - begin, 80u);  // fits the 80 columns of a terminal of unknown width
  }
}

// Lines of the log come from any thread and must not be glued to the bar.
TEST(Progress, TheLogErasesTheBarBeforeALine) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::tmpfile(), std::fclose);
  testing::internal::CaptureStderr();
  {
    ProgressBar bar(out.get(), 10);
    bar.draw(report_at(5, 2));
    const long drawn = std::ftell(out.get());
    std::thread([] { log_warning("something"); }).join();
    EXPECT_EQ(std::ftell(out.get()), drawn + 4);  // \r\x1b[K
    log_warning("more");
    EXPECT_EQ(std::ftell(out.get()), drawn + 4);
  }
  log_warning("without a bar");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("without a bar"), std::string::npos);
}

// A pseudo-terminal of 40 columns that grows: no draw wraps.
TEST(Progress, TheBarFitsTheTerminalWhateverItsWidthIsByNow) {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(grantpt(terminal), 0);
  ASSERT_EQ(unlockpt(terminal), 0);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::fopen(ptsname(terminal), "w"),
                                                            std::fclose);
  ASSERT_NE(out, nullptr);
  StepReport report = report_at(2000, 2.34567);
  report.tokens_per_second = 12345.4;
  const auto drawn = [&](unsigned short columns) {
    winsize size{};
    size.ws_col = columns;
    EXPECT_EQ(ioctl(terminal, TIOCSWINSZ, &size), 0);
    ProgressBar(out.get(), 2000).draw(report);
    std::string text(4096, '\0');
    text.resize(static_cast<std::size_t>(read(terminal, text.data(), text.size())));
    EXPECT_TRUE(text.starts_with('\r') && text.ends_with("\x1b[K")) << text;
    return text.substr(1, text.size() - 4);
  };
  for (const unsigned short columns : {2, 20, 40, 60, 80, 120, 300}) {
    EXPECT_LT(drawn(columns).size(), columns);
  }
  EXPECT_TRUE(drawn(40).starts_with("step 2000/2000  loss 2.3457")) << drawn(40);
  EXPECT_EQ(drawn(60).size(), 59u);
  EXPECT_TRUE(drawn(60).starts_with("[================] step 2000/2000"));
  EXPECT_TRUE(drawn(300).ends_with("norm 0.500"));
  close(terminal);
}

}  // namespace
}  // namespace birkhoff
