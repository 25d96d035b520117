// The source location of each field of a config, for error messages.
#pragma once

#include <google/protobuf/message.h>

#include <map>
#include <string>

#include "cluster/base/error.h"

namespace birkhoff {

// Paths are dotted, with indices for repeated fields: "model.attention.0.group.1.heads". A location
// is the start of an error message: "file:line:column" or "--set path=value".
class SourceLocations {
 public:
  // `whole` is the location of every field that no text sets: the first file's name.
  explicit SourceLocations(std::string whole) : whole_(std::move(whole)) {}

  void set(const std::string& path, std::string place) { places_[path] = std::move(place); }
  // Forgets the field and everything below it, because another value replaces them.
  void forget(const std::string& path);
  // Adds the locations of `other`, which override existing ones.
  void add(const SourceLocations& other);
  // Returns the location of the field, or of the nearest enclosing message that has one.
  const std::string& of(const std::string& path) const;

 private:
  std::string whole_;
  std::map<std::string, std::string> places_;
};

// "a" and "b" -> "a.b"; an empty path is the whole config.
std::string join_path(const std::string& path, const std::string& name);

// Applies `later` to `config`: replaces numbers, strings, the choice in a oneof and whole lists,
// and merges messages. Updates `places` accordingly.
void override_config(google::protobuf::Message& config, SourceLocations& places,
                     const google::protobuf::Message& later, const SourceLocations& later_places);

// Throws Error(kConfig) with "location: path: what".
template <typename... Args>
[[noreturn]] void config_error(const SourceLocations& places, const std::string& path,
                               fmt::format_string<Args...> format, Args&&... args) {
  fail(ExitCode::kConfig, "{}: {}: {}", places.of(path), path,
       fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace birkhoff
