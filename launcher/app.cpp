#include "launcher/app.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/instruction_set.h"
#include "configs/loader/config_io.h"
#include "launcher/command_line.h"
#include "launcher/failure.h"
#include "launcher/output.h"

namespace birkhoff {
namespace {

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

const CLI::App* find_verb(const CLI::App& app, const std::string& name) {
  for (const CLI::App* command : app.get_subcommands({})) {
    if (command->get_name() == name) return command;
  }
  return nullptr;
}

// The innermost subcommand that the arguments name; errors list its options.
const CLI::App& chosen_subcommand(const CLI::App& app, const std::vector<std::string>& arguments) {
  const CLI::App* chosen = &app;
  for (const std::string& argument : arguments) {
    if (const CLI::App* next = find_verb(*chosen, argument)) chosen = next;
  }
  return *chosen;
}

// One line for a command line that does not parse, with the nearest option.
std::string usage_line(const CLI::App& app, const std::vector<std::string>& arguments,
                       const CLI::ParseError& error) {
  const CLI::App& subcommand = chosen_subcommand(app, arguments);
  const std::string what = error.what();
  std::string hint;
  std::vector<std::string> options;
  for (const CLI::Option* option : subcommand.get_options()) {
    if (!option->get_lnames().empty()) options.push_back("--" + option->get_lnames().front());
  }
  for (const std::string& argument : arguments) {
    if (argument.rfind("--", 0) != 0) continue;
    const std::string name = argument.substr(0, argument.find('='));
    if (std::find(options.begin(), options.end(), name) != options.end()) continue;
    if (std::string near = nearest_name(name, options); !near.empty())
      hint = " ('" + name + "' is not an option; did you mean '" + near + "'?)";
  }
  const auto set = std::find(arguments.begin(), arguments.end(), "--set");
  if (hint.empty() && set != arguments.end() && set + 1 != arguments.end() &&
      (set + 1)->find('=') == std::string::npos) {
    hint = " (--set takes one word: PATH=VALUE)";
  }
  std::string name;
  for (const CLI::App* part = &subcommand; part != nullptr; part = part->get_parent()) {
    name = part->get_name() + (name.empty() ? "" : " ") + name;
  }
  return what + hint + "; see '" + name + " --help'";
}

// A line about the first word that should name a subcommand but does not; empty if there is none.
// CLI11 would only say that a subcommand is missing.
std::string unknown_verb(const CLI::App& app, const std::vector<std::string>& arguments) {
  const CLI::App* parent = &app;
  for (const std::string& argument : arguments) {
    if (parent->get_subcommands({}).empty()) return "";
    const CLI::App* next = find_verb(*parent, argument);
    if (next == nullptr) {
      std::vector<std::string> known = subcommand_names(*parent);
      const bool option = argument.rfind('-', 0) == 0;
      if (option) known = {"--help", "--version"};
      if (argument == "-h" || std::find(known.begin(), known.end(), argument) != known.end())
        return "";
      const std::string near = nearest_name(argument, known);
      return fmt::format("unknown {} '{}'{} (commands: {}); see 'birkhoff{} --help'",
                         option ? "option" : "command", argument,
                         near.empty() ? "" : "; did you mean '" + near + "'?",
                         fmt::join(subcommand_names(*parent), ", "),
                         parent == &app ? "" : " " + parent->get_name());
    }
    parent = next;
  }
  return "";
}

}  // namespace

int run_app(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err) {
  const auto say = [&err](const std::string& what, ExitCode code) {
    err << "birkhoff: " << one_line(what) << '\n';
    err.flush();
    return static_cast<int>(code);
  };
  try {
    CommandLine line;
    if (arguments.empty()) {
      err << line.app().help();
      return static_cast<int>(ExitCode::kUsage);
    }
    if (const std::string unknown = unknown_verb(line.app(), arguments); !unknown.empty())
      return say(unknown, ExitCode::kUsage);
    try {
      std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
      line.app().parse(reversed);
    } catch (const CLI::Success& request) {  // --help, --version
      line.app().exit(request, out, out);
      flush_output(out);
      return 0;
    } catch (const CLI::ParseError& error) {
      return say(usage_line(line.app(), arguments, error), ExitCode::kUsage);
    }
    instruction_set();  // before anything computes
    const int code = line.run(arguments, out, err);
    flush_output(out);
    return code;
  } catch (...) {
    const Failure failure = describe_failure(std::current_exception());
    return say(failure.what, failure.code);
  }
}

}  // namespace birkhoff
