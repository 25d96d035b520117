// Scores with the relative positions of Transformer-XL (Dai et al. 2019, section 3.3): for the
// query at token i and the key at token j,
//   score_ij = ((q_i + u) . k_j + (q_i + v) . W r_(i-j)) / sqrt(D)
// where r_d are the sinusoids of the distance d, W is a matrix, and u and v are vectors of each
// head. The parameters belong to the mechanism.
//
// Legend: B batch, H heads, L queries, S keys, C channels, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "attention/kernels/gathered_attention/gathered_attention.h"
#include "attention/kernels/row_normalizer/row_attention.h"
#include "attention/mechanism.h"

namespace birkhoff {

class SinusoidalDistances {
 public:
  // Adds "<prefix>.distance_keys" [H, D, C] and "<prefix>.content_bias" (u) and
  // "<prefix>.distance_bias" (v), [H, D]. Initial values: N(0, 0.02), the authors'.
  SinusoidalDistances(const MechanismShape& shape, const std::string& prefix,
                      Parameters& parameters);

  // Makes scores of q . k those of the formula, for queries that are the last L of S tokens: q
  // becomes q + u, in the type of sums, and the terms of distances are set. Outside training,
  // distances count as shape.distances says.
  void add_to(RowAttention& attention, bool trains) const;
  // The same for softmax: in `attention`, of one segment of all rows, q becomes q + u, and the
  // table of relative positions gets rows W r with the bias (v - u) . W r. Outside training, also
  // limits the band to the window.
  void add_to(GatheredAttention& attention, bool trains) const;
  // int32 [1, L]: the first key that each query sees; undefined: 0.
  at::Tensor first_keys(std::int64_t num_queries, std::int64_t num_keys, bool trains,
                        at::Device device) const;

  // Twice the multiply-adds of the terms of the distances of one sequence, for pairs that see each
  // other.
  double forward_flops(std::int64_t num_tokens) const;

 private:
  // The last keys that a query sees, its own included. 0: all.
  std::int64_t window(bool trains) const { return trains ? 0 : options_.evaluation_window; }
  // W r of the distances S - 1, ..., 0: [H, S, D].
  at::Tensor distance_keys(std::int64_t num_keys, bool trains) const;

  SinusoidalOptions options_;
  at::Tensor weight_HDC, content_bias_HD, distance_bias_HD;
};

}  // namespace birkhoff
