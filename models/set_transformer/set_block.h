// The blocks and layers of set transformers (Lee et al. 2019, "Set Transformer: A Framework for
// Attention-based Permutation-Invariant Neural Networks", section 3, in the form of its published
// code). The order of points has no meaning: permuted points have permuted outputs.
//
// Legend: B batch, N points, M points of another set, C channels, I inducing points.
//
// The paper's MAB, with H heads of D = C / H channels, is
//   O_h = Q_h + A_h V_h,   A_h = weights of the scores Q_h K_h^T / sqrt(C),
//   O = norm(concat_h O_h),   block(X, Y) = norm(O + relu(O W (+ b))),
// where Q = X W_q, K = Y W_k, V = Y W_v. Rows of A sum to 1; with doubly stochastic attention, its
// columns sum to N / M in the limit (Sander et al. 2022 applied to unequal sets).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "models/transformer/multi_head_attention.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

class SetBlock {
 public:
  // `source`: kMemory for block(X, Y), kOwnSequence for block(X, X). `inputs`: the channels of X
  // and Y. `num_points`: the largest of their numbers of points. `field` is the path of `attention`
  // in the configuration. config must be resolved. Error(kConfig) if the mechanism does not support
  // sets.
  SetBlock(const configs::Config& config, const configs::Attention& attention,
           const std::string& field, KeySource source, const InputWidths& inputs,
           std::int64_t noise_number, std::int64_t num_points, const std::string& name,
           Parameters& parameters);

  // [B, N, C], in the parameters' dtype, as the inputs x [B, N, ..] and y [B, M, ..]. y is
  // undefined for block(X, X).
  at::Tensor operator()(const at::Tensor& x, const at::Tensor& y,
                        const std::optional<NoiseKey>& noise) const;
  double forward_flops(std::int64_t num_x, std::int64_t num_y) const;
  bool balances_keys() const { return attention_.balances_keys(); }

 private:
  at::ScalarType dtype_;
  MultiHeadAttention attention_;
  std::optional<LayerNorm> attention_norm_, output_norm_;  // both or none
  Linear linear_;
};

// The paper's ISAB, block(X, block(I, X)) with learned points I, or without inducing points its
// SAB, block(X, X).
class SetLayer {
 public:
  // The layer `number`, from 0, of task.point_sets; x has `width` channels. Layer i has the entry i
  // modulo the number of entries of model.attention. `parameters` must outlive it.
  SetLayer(const configs::Config& config, std::int64_t number, std::int64_t width,
           Parameters& parameters);

  // [B, N, C] for x [B, N, ..]. Keeps no state, so it may be called again to recompute.
  at::Tensor operator()(const at::Tensor& x, const std::optional<NoiseKey>& noise) const;
  double forward_flops(std::int64_t num_points) const;

 private:
  const Parameters& parameters_;
  int unit_;             // Parameters::begin_unit()
  at::Tensor points_IC;  // undefined: none
  std::optional<SetBlock> inducing_block_;
  SetBlock block_;
};

// `count` learned points of C channels, uniform as the matrix [count, C] of Glorot & Bengio 2010.
at::Tensor add_learned_points(std::int64_t count, std::int64_t channels, const std::string& name,
                              Parameters& parameters);
// The same points for each of `batch` sets: [B, count, C].
at::Tensor for_each_set(const at::Tensor& points, std::int64_t batch);

}  // namespace birkhoff
