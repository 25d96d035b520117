// The number range of balances in the ordinary domain: scores within kSpread of the shift and sums
// within [kLeast, 1 / kLeast] keep every product of two factors a normal number.
#pragma once

namespace birkhoff {

template <typename T>
struct BalanceRange;
template <>
struct BalanceRange<float> {
  static constexpr float kSpread = 30, kLeast = 1e-24f;
};
template <>
struct BalanceRange<double> {
  static constexpr double kSpread = 200, kLeast = 1e-200;
};

}  // namespace birkhoff
