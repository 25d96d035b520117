// Optional logit terms shared by all mechanisms: relative positions and attention sinks. Their
// parameters belong to the mechanism.
//
// Legend: B batch, H heads, S keys, K lists of W keys, R rows of a table, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "attention/kernels/gathered_attention/gathered_attention.h"
#include "attention/kernels/relative_positions/relative_positions.h"
#include "attention/kernels/row_normalizer/row_normalizer.h"
#include "attention/mechanism.h"

namespace birkhoff {

class LogitTerms {
 public:
  // Adds "<prefix>.relative_keys" and "<prefix>.relative_values", [1 or H, R, D], and
  // "<prefix>.sink", [H], as far as the configuration has them.
  LogitTerms(const configs::Mechanism& config, const MechanismShape& shape,
             const std::string& prefix, Parameters& parameters);

  // In the dtype of the queries; undefined where there are none.
  RelativePositions relative(const at::Tensor& q_BHLD) const;
  at::Tensor sink(const at::Tensor& q_BHLD) const;

  // The attention of one query of each sequence to all these keys. Relative positions apply to the
  // last `in_place` of them, which end at the query's own token.
  at::Tensor attend(const at::Tensor& q_BH1D, const at::Tensor& k_BHSD, const at::Tensor& v_BHSD,
                    std::int64_t in_place, const RowNormalizer& normalizer = {}) const;

  // The attention of the query at position `now` of each sequence to listed keys: where
  // visible_BHKW, to token token_BHKW (int64) of k and v. H are key heads, K lists of W tokens. One
  // softmax over all lists, or the mean of one softmax per list that has a visible key.
  at::Tensor attend_listed(const at::Tensor& q_BH1D, const at::Tensor& k_BHSD,
                           const at::Tensor& v_BHSD, const at::Tensor& token_BHKW,
                           const at::Tensor& visible_BHKW, std::int64_t now, SlotMerge merge) const;

  // Whether outputs stay weighted means of values.
  bool is_convex() const { return !relative_.values_HRD.defined() && !sink_H_.defined(); }
  // Twice the multiply-adds of the forward pass of one token.
  double forward_flops() const;

 private:
  RelativePositions relative_;
  at::Tensor sink_H_;
};

}  // namespace birkhoff
