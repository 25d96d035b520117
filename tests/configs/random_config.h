// Random configurations over the schema, drawn by reflection: new fields need no code here.
#pragma once

#include <cstdint>
#include <random>
#include <string>

#include "configs/schema/config.pb.h"

namespace birkhoff {

class RandomConfig {
 public:
  explicit RandomConfig(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t end) { return random_() % end; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }

  // Sets fields of the message and below; `hostile`: sets some to values far outside their ranges.
  void fill(google::protobuf::Message& message, bool hostile);
  // Returns a `path=value` for --set, mostly with fields that exist.
  std::string setting();
  // Returns the text with a few characters or lines deleted, duplicated, moved or replaced.
  std::string damaged(std::string text);

 private:
  void set(google::protobuf::Message& message, const google::protobuf::FieldDescriptor* field,
           bool hostile);
  std::string hostile_text();

  std::mt19937_64 random_;
};

// Makes most random configs valid and small, so that the tests also cover accepted configs.
void make_consistent(configs::Config& config);

}  // namespace birkhoff
