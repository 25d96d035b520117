// Configurations drawn at random over the schema, by reflection: new fields are drawn without a
// line here.
#pragma once

#include <cstdint>
#include <random>
#include <string>

#include "configs/config.pb.h"

namespace birkhoff {

class RandomConfig {
 public:
  explicit RandomConfig(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t end) { return random_() % end; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }

  // Sets fields of the message and below; `hostile`: some to values far outside of their ranges.
  void fill(google::protobuf::Message& message, bool hostile);
  // A text of `path=value` for --set, mostly of fields that exist.
  std::string setting();
  // The text with a few characters or lines deleted, doubled, moved or replaced.
  std::string damaged(std::string text);

 private:
  void set(google::protobuf::Message& message, const google::protobuf::FieldDescriptor* field,
           bool hostile);
  std::string hostile_text();

  std::mt19937_64 random_;
};

// Makes most random configs valid and small, so that what is accepted is tested too.
void make_consistent(configs::Config& config);

}  // namespace birkhoff
