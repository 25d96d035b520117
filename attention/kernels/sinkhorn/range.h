// The number range of balances in the ordinary domain.
#pragma once

namespace birkhoff {

// In fp64: scores within kSpread of the shift and sums within [kLeast, 1 / kLeast] keep every
// product of two factors a normal number.
struct BalanceRange {
  static constexpr double kSpread = 200, kLeast = 1e-200;
};

// In fp32, without a shift: |S| <= kSpread. First sums, of up to 256 terms, are within
// [kLeast, 1 / kLeast], and of two factors those whose product could leave fp32 meet barred scores
// alone.
struct DeviceBalanceRange {
  static constexpr float kSpread = 50, kLeast = 1e-25f;
};

}  // namespace birkhoff
