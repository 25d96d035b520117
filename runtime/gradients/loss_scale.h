// The dynamic loss scale of fp16 training (Micikevicius et al. 2018, "Mixed precision training",
// sections 3.2 and 3.2.1): small gradients would be rounded to zero, so the loss is multiplied
// before the backward pass and the gradients are divided after it. The scale is a power of two, so
// neither rounds. Losses are sums over tokens here, so the scale may well be below 1.
#pragma once

#include <algorithm>
#include <cstdint>

namespace birkhoff {

struct LossScale {
  static constexpr double kInitial = 0x1p16, kMin = 0x1p-24, kMax = 0x1p24;
  static constexpr std::int32_t kGrowAfter = 2000;  // steps without an overflow

  double value = 1;              // 1 if the precision needs no scale
  std::int32_t steps_since = 0;  // steps applied since the scale last changed

  // Whether non-finite gradients may be due to the scale. At the minimum they are the model's.
  bool may_overflow() const { return value > kMin; }
  // Call if gradients were not finite.
  void shrink() {
    value = std::max(kMin, value / 2);
    steps_since = 0;
  }
  // Call if a step was applied.
  void keep() {
    if (++steps_since < kGrowAfter) return;
    value = std::min(kMax, value * 2);
    steps_since = 0;
  }
};

}  // namespace birkhoff
