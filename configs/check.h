// What a value must be beyond its type, and what it is where a user sets none.
#pragma once

#include <google/protobuf/descriptor.h>

#include <string>

#include "configs/config.pb.h"
#include "configs/places.h"

namespace birkhoff {

// An interval of the schema's (range) option: "[0, 1)", "(0, inf)".
class Range {
 public:
  explicit Range(const std::string& text);
  bool contains(double value) const;

 private:
  double low_, high_;
  bool low_open_, high_open_;
};

// Every value alone: numbers in their ranges, strings that are text. Errors: Error(kConfig) with
// place, field, value and what is allowed, as in the next.
void check_values(const google::protobuf::Message& config, const Places& places);

// Sets every field that is not set: numbers, strings and enums to their defaults, messages
// recursively (of a oneof only the chosen one; optimizer: adamw, mechanism: dense), 0s that stand
// for "derived" to what they are derived to where the config alone decides it. Resolving twice
// changes nothing. Expects numbers in their ranges.
void resolve(configs::Config& config);

// Values of a resolved config against each other.
void check_consistency(const configs::Config& config, const Places& places);

}  // namespace birkhoff
