// A matrix of weights in scratch, for passes that would otherwise multiply all queries and keys
// again. Included by files that are compiled once for each instruction set.
#pragma once

#include "attention/kernels/tile_attention/cpu_head_body.h"

namespace birkhoff {
namespace {

// M [queries, keys] in tiles [kTile keys, kTile queries], as passes over tiles use them. Queries
// that fill the last tile must have finite elements.
template <typename S>
class CachedMatrix {
 public:
  static constexpr int kN = kLanes<S>;

  static std::size_t bytes(int num_queries, int num_keys) {
    return static_cast<std::size_t>(whole_tiles(num_queries)) *
           static_cast<std::size_t>(whole_tiles(num_keys)) * sizeof(S);
  }

  CachedMatrix() = default;
  // `elements`: bytes() of scratch. `lane_sums`: kN elements for each key.
  CachedMatrix(S* elements, S* lane_sums, int num_queries, int num_keys)
      : elements_(elements),
        lane_sums_(lane_sums),
        num_queries_(num_queries),
        num_keys_(num_keys) {}

  S* tile(int first_query, int first_key) const {
    const std::ptrdiff_t tiles_of_keys = whole_tiles(num_keys_) / kTile;
    return elements_ + (first_query / kTile * tiles_of_keys + first_key / kTile) * kTile * kTile;
  }

  // y = M x. Fills whole tiles of y.
  void times(const S* x, S* y) const {
    for (int first = 0; first < num_queries_; first += kTile) {
      for (int i = 0; i < kTile; ++i) y[first + i] = 0;
      for_tiles_of_keys(first, [&](int first_key, int count, const S* m) {
        Vector<S> sum[kTile / kN] = {};
        for (int j = 0; j < count; ++j) {
          for (int i = 0; i < kTile / kN; ++i) {
            multiply_add<S>(load(m + j * kTile + i * kN), x[first_key + j], sum[i]);
          }
        }
        for (int i = 0; i < kTile / kN; ++i) {
          S* to = y + first + i * kN;
          store(to, load(to) + sum[i]);
        }
      });
    }
  }

  // y = M^t x. Queries that fill the last tile have x = 0.
  void transposed_times(const S* x, S* y) const {
    clear_lanes();
    for (int first = 0; first < num_queries_; first += kTile) {
      for_tiles_of_keys(first, [&](int first_key, int count, const S* m) {
        for (int j = 0; j < count; ++j) {
          Vector<S> sum{};
          for (int i = 0; i < kTile; i += kN) {
            sum += load(m + j * kTile + i) * load(x + first + i);
          }
          add_to_lanes(first_key + j, sum);
        }
      });
    }
    add_lanes(y);
  }

  // Sums over queries in the lanes of each key.
  void clear_lanes() const {
    for (int n = 0; n < num_keys_ * kN; ++n) lane_sums_[n] = 0;
  }
  void add_to_lanes(int key, Vector<S> x) const {
    S* to = lane_sums_ + std::ptrdiff_t{key} * kN;
    store(to, load(to) + x);
  }
  // y_j = the sum of key j's lanes.
  void add_lanes(S* y) const {
    for (int j = 0; j < num_keys_; ++j) {
      S sum = 0;
      for (int lane = 0; lane < kN; ++lane) sum += lane_sums_[std::ptrdiff_t{j} * kN + lane];
      y[j] = sum;
    }
  }

 private:
  template <typename F>
  void for_tiles_of_keys(int first_query, F f) const {
    for (int first = 0; first < num_keys_; first += kTile) {
      f(first, min_of(kTile, num_keys_ - first), tile(first_query, first));
    }
  }

  S *elements_ = nullptr, *lane_sums_ = nullptr;
  int num_queries_ = 0, num_keys_ = 0;
};

}  // namespace
}  // namespace birkhoff
