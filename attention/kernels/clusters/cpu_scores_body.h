// The products of cpu_scores.h, compiled once for each instruction set.
#pragma once

#include "attention/kernels/clusters/cpu_scores.h"
#include "attention/kernels/common/cpu_products.h"

namespace birkhoff {
namespace {

// Rows are widened to S before products: scores are fp32 for bf16, too.
template <typename S>
inline int wide_columns(int head_dim) {
  return round_up(head_dim, kLanes<S>);
}

template <typename T>
void widen(const T* x, int head_dim, int columns, Sum<T>* wide) {
  for (int d = 0; d < head_dim; ++d) wide[d] = to_sum(x[d]);
  for (int d = head_dim; d < columns; ++d) wide[d] = 0;
}

template <typename S>
inline S sum_of_lanes(Vector<S> v) {
  S sum = 0;
  for (int lane = 0; lane < kLanes<S>; ++lane) sum += v[lane];
  return sum;
}

// The dot product of a and b over `columns` elements, a multiple of the lanes.
template <typename S>
inline S dot(const S* a, const S* b, int columns) {
  Vector<S> sum{};
  for (int d = 0; d < columns; d += kLanes<S>) sum += load(a + d) * load(b + d);
  return sum_of_lanes<S>(sum);
}

// Scales the scores of a row and finds its best one.
template <typename S>
void finish_scores(int clusters, int padded, S inverse, S* scores, std::int32_t& best,
                   S& best_score) {
  constexpr int kN = kLanes<S>;
  constexpr S kLeast = -__builtin_huge_val();
  Bits<S> lane{};
  for (int i = 0; i < kN; ++i) lane[i] = i;
  Vector<S> most = Vector<S>{} + kLeast;
  Bits<S> most_at{};
  for (int c = 0; c < padded; c += kN) {
    const Bits<S> at = lane + c;
    const Vector<S> score = at < clusters ? load(scores + c) * inverse : Vector<S>{} + kLeast;
    store(scores + c, score);
    const Bits<S> better = score > most;
    most = better ? score : most;
    most_at = better ? at : most_at;
  }
  best = 0;
  best_score = kLeast;
  for (int i = 0; i < kN; ++i) {
    const auto at = static_cast<std::int32_t>(most_at[i]);
    if (most[i] > best_score || (most[i] == best_score && most[i] != kLeast && at < best)) {
      best = at;
      best_score = most[i];
    }
  }
  if (best_score == kLeast) best_score = scores[0];  // all are NaN, or -infinity
}

template <typename T>
std::size_t score_scratch_bytes(int head_dim) {
  return sizeof(Sum<T>) * kTile * static_cast<std::size_t>(wide_columns<Sum<T>>(head_dim));
}

template <typename T>
void score(const ScoreShape& shape, const Sum<T>* centroids_DK, const ScoredRows<T>& rows,
           void* scratch) {
  using S = Sum<T>;
  const int D = shape.head_dim, columns = wide_columns<S>(D), padded = shape.padded_clusters<S>();
  auto* const wide = static_cast<S*>(scratch);
  const int panels = round_up(rows.num_rows, kPanel);
  for (int r = 0; r < rows.num_rows; ++r) {
    S* const row = wide + r * columns;
    widen(rows.x.data + r * rows.x.stride, D, columns, row);
    const S square = dot(row, row, columns);
    rows.inverse[r] = square == 0 ? S{0} : 1 / static_cast<S>(__builtin_sqrt(square));
    const S factor = rows.inverse[r] * static_cast<S>(shape.length);
    T* const unit = rows.unit.data + r * rows.unit.stride;
    for (int d = 0; d < D; ++d) unit[d] = from_sum<T>(row[d] * factor);
  }
  for (int i = rows.num_rows * columns; i < panels * columns; ++i) wide[i] = 0;
  for (int r = 0; r < panels; r += kPanel) {
    multiply_panel(wide + r * columns, columns, 1, centroids_DK, padded, D,
                   rows.scores + r * padded, padded, padded, /*accumulate=*/false);
  }
  for (int r = 0; r < rows.num_rows; ++r) {
    finish_scores(shape.clusters, padded, rows.inverse[r], rows.scores + r * padded, rows.best[r],
                  rows.best_score[r]);
  }
}

template <typename T>
void row_gradient(const ScoreShape& shape, const RowGradient<T>& row, void* scratch) {
  using S = Sum<T>;
  const int D = shape.head_dim, columns = wide_columns<S>(D);
  auto *const u = static_cast<S*>(scratch), *const g = u + columns;
  const S length = static_cast<S>(shape.length);
  widen(row.unit, D, columns, u);
  for (int d = 0; d < D; ++d) u[d] /= length;
  for (int d = 0; d < columns; ++d) g[d] = 0;
  if (row.d_unit) {
    for (int d = 0; d < D; ++d) g[d] = length * to_sum(row.d_unit[d]);
  }
  if (row.d_distance != 0) {
    const S factor = 2 * row.d_distance;
    for (int d = 0; d < D; ++d) g[d] += factor * (u[d] - row.centroid[d]);
  }
  const S along = dot(u, g, columns);
  for (int d = 0; d < D; ++d) row.d_x[d] = from_sum<T>((g[d] - u[d] * along) * row.inverse);
}

template <typename T>
constexpr ScoreKernels<T> kScoreKernels{score_scratch_bytes<T>, score<T>, row_gradient<T>};

}  // namespace
}  // namespace birkhoff
