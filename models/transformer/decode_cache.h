// The memory of a model that decodes one token after another.
//
// Legend: B batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace birkhoff {

// The caches of one generation run.
class DecodeCache {
 public:
  virtual ~DecodeCache() = default;

  // Sequence i becomes what sequence rows_B[i] is (int64 [any number], on the cache's device).
  virtual void select_rows(const at::Tensor& rows_B) = 0;
  // How many tokens of each sequence it holds.
  virtual std::int64_t length() const = 0;
};

}  // namespace birkhoff
