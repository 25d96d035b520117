#include "launcher/output.h"

#include <gtest/gtest.h>

namespace birkhoff {
namespace {

TEST(TerminalText, ShowsWhatATerminalWouldObey) {
  EXPECT_EQ(terminal_text("plain text,\n\tnaïve 你好 \U0001f600"),
            "plain text,\n\tnaïve 你好 \U0001f600");
  EXPECT_EQ(terminal_text("\x1b[2J\r\a\x7f"), "\\x1b[2J\\x0d\\x07\\x7f");
  EXPECT_EQ(terminal_text(std::string("\0a", 2)), "\\x00a");
  EXPECT_EQ(terminal_text("\u009b31m\u00a0"), "\\u009b31m\u00a0");  // a control of two bytes
  EXPECT_EQ(terminal_text("\x9b\xe4\xbd"), "\\x9b\\xe4\\xbd");      // not UTF-8
  EXPECT_EQ(terminal_text("\xc0\x9b"), "\\xc0\\x9b");
  EXPECT_EQ(terminal_text(""), "");
}

}  // namespace
}  // namespace birkhoff
