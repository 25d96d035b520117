// What a value must be beyond its type.
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

// Values of a resolved config against each other.
void check_consistency(const configs::Config& config, const Places& places);

}  // namespace birkhoff
