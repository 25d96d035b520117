// The keys and values of the tokens decoded so far.
// Legend: B batch, H heads, S tokens so far, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/mechanism.h"

namespace birkhoff {

class KeyValueCache {
 public:
  // Appends one token: [B, H, 1, D] each.
  void append(const at::Tensor& k_BH1D, const at::Tensor& v_BH1D);

  std::int64_t size() const { return size_; }
  // Tokens [first, last), as views [B, H, last - first, D] that the next append may invalidate.
  at::Tensor keys(std::int64_t first, std::int64_t last) const;
  at::Tensor values(std::int64_t first, std::int64_t last) const;
  // As DecodeState::select_rows.
  void select_rows(const at::Tensor& rows_B);

 private:
  std::int64_t size_ = 0;
  at::Tensor keys_BHSD_, values_BHSD_;  // with room for more than size_ tokens
};

// The state of mechanisms that need only the cache.
struct KeyValueState final : DecodeState {
  void select_rows(const at::Tensor& rows_B) override { cache.select_rows(rows_B); }
  KeyValueCache cache;
};

}  // namespace birkhoff
