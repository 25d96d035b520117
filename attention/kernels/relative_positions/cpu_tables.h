// The tables of relative positions as the CPU loop reads them (tile_attention/cpu_loop.h), and the
// sums of their gradients.
//
// Legend: H heads, R rows of a table, D head dim, P parts of the work.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/relative_positions/relative_positions.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {

// For T = float, double and Bf16.
template <typename T>
class DistanceTables {
 public:
  DistanceTables() = default;
  explicit DistanceTables(const RelativePositions& relative);

  int num_distances() const { return num_distances_; }  // 0 without relative positions

  // Makes sums for the gradients of `parts` parts of the work for each of `heads` heads. Two
  // threads may not work on the same part of a head. To keep the same bits for any number of
  // threads, parts must not depend on it.
  void start_gradients(std::int64_t parts, std::int64_t heads);

  // For one head, with the sums of one part.
  TileDistances<T> of(std::int64_t head, std::int64_t part = 0) const;

  // The gradients in the tables' dtypes: those of keys and bias are the sums times `key_factor`.
  // Undefined without the table.
  struct Gradients {
    at::Tensor d_keys_HRD, d_values_HRD, d_bias_HR;
  };
  Gradients gradients(double key_factor, double value_factor) const;

 private:
  RelativePositions relative_;
  int num_distances_ = 0;
  at::Tensor keys_HRD_, keys_t_HDR_, values_HRD_, values_t_HDR_;  // rows of whole_columns()
  at::Tensor bias_H1R_;
  at::Tensor d_keys_PHRD_, d_values_PHRD_, d_bias_PH1R_;
};

}  // namespace birkhoff
