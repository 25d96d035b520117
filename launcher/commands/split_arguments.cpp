#include "launcher/commands/split_arguments.h"

#include <charconv>
#include <filesystem>
#include <optional>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

constexpr double kMaxHeldOut = 0.9;

std::optional<double> number_in(const std::string& value) {
  double number = 0;
  const auto read = std::from_chars(value.data(), value.data() + value.size(), number);
  const bool is_number =
      !value.empty() && read.ec == std::errc() && read.ptr == value.data() + value.size();
  return is_number ? std::optional(number) : std::nullopt;
}

bool names_something(const std::string& path) {
  std::error_code ignored;
  return path == "-" || std::filesystem::exists(path, ignored);
}

// The values of --valid or --test: one fraction, or paths.
class HeldOut {
 public:
  HeldOut(std::string option, double& fraction, std::vector<std::string>& paths)
      : option_(std::move(option)), fraction_(fraction), paths_(paths) {}

  const std::string& option() const { return option_; }
  bool has_paths() const { return !paths_.empty(); }

  // Returns false for a value after a fraction, which does not belong to the option.
  bool take(const std::string& value, std::vector<std::string>& notes) {
    const std::optional<double> number = number_in(value);
    if (!number) {
      if (is_given_) return false;
      if (!names_something(value)) {
        fail(ExitCode::kUsage,
             "{} {}: neither a fraction from 0 to {} nor an existing file or folder", option_,
             value, kMaxHeldOut);
      }
      paths_.push_back(value);
      return true;
    }
    if (is_given_ || has_paths()) {
      fail(ExitCode::kUsage,
           "{} {}: give one fraction or several paths, not both; a file of that name is ./{}",
           option_, value, value);
    }
    if (!(*number >= 0 && *number <= kMaxHeldOut)) {
      fail(ExitCode::kUsage, "{} {}: give a fraction from 0 to {}, or files and folders", option_,
           value, kMaxHeldOut);
    }
    if (names_something(value)) {
      notes.push_back(fmt::format("{} {} is read as a fraction; the file of that name is ./{}",
                                  option_, value, value));
    }
    fraction_ = *number;
    is_given_ = true;
    return true;
  }

 private:
  std::string option_;
  double& fraction_;
  std::vector<std::string>& paths_;
  bool is_given_ = false;  // the fraction
};

}  // namespace

std::vector<std::string> set_texts(const std::vector<PrepareArguments::Text>& texts,
                                   PrepareOptions& options) {
  std::vector<std::string> notes, positional;
  HeldOut valid("--valid", options.valid_fraction, options.valid_paths);
  HeldOut test("--test", options.test_fraction, options.test_paths);
  for (const auto& [option, value] : texts) {
    if (option == "--train") {
      options.paths.push_back(value);
      continue;
    }
    const bool taken = (option == valid.option() && valid.take(value, notes)) ||
                       (option == test.option() && test.take(value, notes));
    if (!taken) positional.push_back(value);
  }
  if (positional.empty()) {
    if (options.paths.empty() && (valid.has_paths() || test.has_paths()))
      fail(ExitCode::kUsage, "--train is required if --valid or --test name texts");
    return notes;
  }
  if (!options.paths.empty() || valid.has_paths() || test.has_paths()) {
    fail(ExitCode::kUsage,
         "{}: if --train, --valid or --test name texts, each text needs one of these options; put "
         "it after one",
         positional.front());
  }
  options.paths = std::move(positional);
  return notes;
}

}  // namespace birkhoff
