// `--set path=value`.
#pragma once

#include <string>

#include "configs/loader/source_locations.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

// Applies one setting. The path is dotted; list elements are named by index, and the next free
// index appends one (model.attention.0.group.1.heads=2). Values: a number (integers also as 1e3),
// true or false, an enum value, a string (quotes are optional), {text format} for a message,
// [{...}, {...}] for a list. A message or list is replaced, not merged. Naming a member of a oneof
// chooses it. Error(kConfig): "--set path=value: ...".
void apply_setting(const std::string& setting, configs::Config& config, SourceLocations& places);

}  // namespace birkhoff
