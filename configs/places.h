// Where each field of a config got its value, for messages.
#pragma once

#include <google/protobuf/message.h>

#include <map>
#include <string>

#include "cluster/base/error.h"

namespace birkhoff {

// Paths are dotted, with indices for repeated fields: "model.attention.0.group.1.heads". A place is
// what a message starts with: "file:line:column" or "--set path=value".
class Places {
 public:
  // `whole` is the place of everything that was not written anywhere: the first file's name.
  explicit Places(std::string whole) : whole_(std::move(whole)) {}

  void set(const std::string& path, std::string place) { places_[path] = std::move(place); }
  // Forgets the field and everything below it: another value replaces it.
  void forget(const std::string& path);
  // Adds the other's places; they win.
  void add(const Places& other);
  // The place of the field, else of the nearest message around it that was written.
  const std::string& of(const std::string& path) const;

 private:
  std::string whole_;
  std::map<std::string, std::string> places_;
};

// "a" and "b" -> "a.b"; an empty path is the whole config.
std::string join_path(const std::string& path, const std::string& name);

// What a later text sets replaces what was there: numbers, strings and the choice in a oneof are
// replaced, messages merged, lists replaced as a whole. `places` follow.
void override_config(google::protobuf::Message& config, Places& places,
                     const google::protobuf::Message& later, const Places& later_places);

// throw Error(kConfig, "place: path: what").
template <typename... Args>
[[noreturn]] void refuse(const Places& places, const std::string& path,
                         fmt::format_string<Args...> format, Args&&... args) {
  fail(ExitCode::kConfig, "{}: {}: {}", places.of(path), path,
       fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace birkhoff
