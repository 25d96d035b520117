// The number range of balances that are computed in the ordinary domain, not in the log domain.
#pragma once

namespace birkhoff {

// In fp64: scores within kSpread of the shift and sums within [kMin, 1 / kMin] keep every
// product of two factors a normal number.
struct BalanceRange {
  static constexpr double kSpread = 200, kMin = 1e-200;
};

// In fp32, without a shift: |S| <= kSpread. The first sums, of up to 256 terms, stay within
// [kMin, 1 / kMin]. The product of two factors can leave fp32 only where the score is masked.
struct DeviceBalanceRange {
  static constexpr float kSpread = 50, kMin = 1e-25f;
};

}  // namespace birkhoff
