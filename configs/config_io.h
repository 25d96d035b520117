// Configuration texts to messages: Protobuf text with limits, `include`, `--set`, and errors that
// name file, line, column and field.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "configs/config.pb.h"

namespace birkhoff {

// Reads a .txtpb with its includes, applies `path=value` settings in order, and checks every value.
// What is returned is resolved: every field is set, defaults included (messages of a oneof only
// where chosen). Limits: 4 MiB a file, nesting 100, includes 32 deep and below the first file's
// folder. A pipe is read to its end (File::kPipeSeconds) and includes nothing. Errors:
// Error(kConfig), "file:line:column: field.path: what, allowed values, nearest name".
configs::Config load_config(const std::filesystem::path& file,
                            const std::vector<std::string>& settings);
// The same from a text; `name` stands for the file in messages. Used for checkpoints' own configs
// and tests.
configs::Config parse_config(const std::string& text, const std::string& name,
                             const std::vector<std::string>& settings);

// The resolved config as text, in the order of the schema; parse_config reads it back to the same
// message.
std::string config_text(const configs::Config& config);

// Fields that differ, as "path: a -> b" lines in schema order; `fixed` tells whether the schema
// forbids changing it on resume.
struct ConfigDifference {
  std::string path, before, after;
  bool fixed = false;
};
std::vector<ConfigDifference> diff_configs(const configs::Config& before,
                                           const configs::Config& after);

// Markdown reference of every field: type, default, fixed or free, and the comment of the .proto.
// docs/configuration.md is this text.
std::string config_reference();

// "did you mean ...": the candidate nearest to `name` by edit distance, empty if none is near.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace birkhoff
