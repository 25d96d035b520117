// The dynamic loss scale of fp16 training (Micikevicius et al. 2018, "Mixed precision training",
// sections 3.2 and 3.2.1): small gradients would be rounded to zero, so the loss is multiplied
// before the backward pass and gradients divided after it. Powers of two, so neither rounds. Losses
// are sums over tokens here, so that the scale may well be below 1.
#pragma once

#include <algorithm>
#include <cstdint>

namespace birkhoff {

struct LossScale {
  static constexpr double kFirst = 0x1p16, kLeast = 0x1p-24, kMost = 0x1p24;
  static constexpr std::int32_t kGrowAfter = 2000;  // steps without an overflow

  double value = 1;              // 1 where precision needs none
  std::int32_t steps_since = 0;  // applied since the scale last changed

  // Whether gradients that are not finite may be the scale's doing. At the least they are the
  // model's.
  bool may_overflow() const { return value > kLeast; }
  // Gradients were not finite.
  void shrink() {
    value = std::max(kLeast, value / 2);
    steps_since = 0;
  }
  // A step was applied.
  void keep() {
    if (++steps_since < kGrowAfter) return;
    value = std::min(kMost, value * 2);
    steps_since = 0;
  }
};

}  // namespace birkhoff
