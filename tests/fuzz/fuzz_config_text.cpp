#include "configs/loader/config_io.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {

void fuzz_config_text(std::string_view input) {
  constexpr std::string_view kMark = "--set\n";
  std::string text(input);
  std::vector<std::string> settings;
  if (const std::size_t mark = text.find(kMark); mark != std::string::npos) {
    for (std::size_t begin = mark + kMark.size(); begin < text.size();) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      settings.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
    text.resize(mark);
  }
  configs::Config config;
  if (!is_accepted(ExitCode::kConfig, [&] { config = parse_config(text, "text", settings); })) {
    return;
  }
  const std::string resolved = config_text(config);
  const configs::Config again = parse_config(resolved, "resolved", {});
  expect_promise(config_text(again) == resolved, "a second resolution changes nothing");
  expect_promise(diff_configs(config, again).empty(), "a config does not differ from itself");
}

}  // namespace birkhoff
