// The whole state of a training, whichever rank holds it.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

#include "runtime/run_checkpoints.h"
#include "tests/runtime/toy_training.h"

namespace birkhoff::test {

// Parameters and optimizer state as bytes by name, however they are cut into parts and whichever
// ranks hold those. Collective over the training's group.
inline std::map<std::string, std::string> gathered_state(ToyTraining& training,
                                                         ProcessGroup& group) {
  const auto append = [](std::string& text, const std::string& bytes) {
    const std::size_t size = bytes.size();
    text.append(reinterpret_cast<const char*>(&size), sizeof(size)).append(bytes);
  };
  std::string mine;
  for (const TensorPart& part :
       training_parts(training.model, training.buckets, *training.optimizer, group.size())) {
    append(mine, part.name);
    append(mine, std::to_string(part.region.flat_begin));
    append(mine, {static_cast<const char*>(part.data.const_data_ptr()), part.data.nbytes()});
  }
  std::map<std::string, std::map<std::int64_t, std::string>> parts;
  for (const std::string& text : group.all_gather_bytes(mine, "state")) {
    std::size_t at = 0;
    const auto next = [&] {
      std::size_t size = 0;
      std::memcpy(&size, text.data() + at, sizeof(size));
      at += sizeof(size) + size;
      return text.substr(at - size, size);
    };
    while (at < text.size()) {
      const std::string name = next();
      const std::int64_t begin = std::stoll(next());
      const std::string bytes = next();
      if (bytes.empty()) continue;
      const auto [place, is_new] = parts[name].emplace(begin, bytes);
      EXPECT_TRUE(is_new || place->second == bytes) << name << " differs between ranks";
    }
  }
  std::map<std::string, std::string> state;
  for (const auto& [name, by_place] : parts) {
    for (const auto& [place, bytes] : by_place) state[name] += bytes;
  }
  return state;
}

}  // namespace birkhoff::test
