// The number range of balances in the ordinary domain, which are in fp64: scores within kSpread of
// the shift and sums within [kLeast, 1 / kLeast] keep every product of two factors a normal number.
#pragma once

namespace birkhoff {

struct BalanceRange {
  static constexpr double kSpread = 200, kLeast = 1e-200;
};

}  // namespace birkhoff
