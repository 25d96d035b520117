// The reader of configurations: Protobuf text format with limits, `include`, `--set`, and errors
// that name file, line, column and field.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "configs/loader/source_locations.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

// The treatment of values that have no effect (useless_values() in configs/loader/check.h). Runs of
// earlier versions may have them.
enum class UselessValues { kRefuse, kKeep };

// Reads a .txtpb with its includes, applies `path=value` settings in order, and checks every value.
// The result is resolved: every field is set, including defaults (in a oneof only the chosen
// message). Limits: 4 MiB per file, nesting 100, includes 32 deep and inside the first file's
// folder. A pipe is read to its end (File::kPipeSeconds) and cannot include files. Error(kConfig):
// "file:line:column: field.path: what, allowed values, nearest name".
configs::Config load_config(const std::filesystem::path& file,
                            const std::vector<std::string>& settings,
                            UselessValues useless = UselessValues::kRefuse);
// The same for a text; messages use `name` as the file name. Used for the configs in checkpoints
// and in tests.
configs::Config parse_config(const std::string& text, const std::string& name,
                             const std::vector<std::string>& settings);

// Returns the resolved config as text, in schema order; parse_config() turns it back into the same
// message.
std::string config_text(const configs::Config& config);

// Fields that differ, in schema order, with their values as text.
struct ConfigDifference {
  std::string path, before, after;
  bool fixed = false;       // the schema forbids changing the field on resume
  bool evaluation = false;  // an evaluation may change it
};
std::vector<ConfigDifference> diff_configs(const configs::Config& before,
                                           const configs::Config& after);

// Returns a Markdown reference of every field of configurations and site profiles: type, default,
// fixed or free, and the comment of the .proto. docs/configuration.md is this text.
std::string config_reference();

// For "did you mean ...": returns the candidate nearest to `name` by edit distance, or "" if none
// is near.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);

// Applies one setting, `path=value`. The path is dotted; list elements are named by index, and the
// next free index appends one (model.attention.0.group.1.heads=2). Values: a number (integers also
// as 1e3), true or false, an enum value, a string (quotes are optional), {text format} for a
// message, [{...}, {...}] for a list. A message or list is replaced, not merged. Naming a member of
// a oneof chooses it. Error(kConfig): "--set path=value: ...".
void apply_setting(const std::string& setting, configs::Config& config, SourceLocations& places);

}  // namespace birkhoff
