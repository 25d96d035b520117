#include <ATen/ATen.h>

#include <cmath>

#include "attention/kernels/block_attention/listed_keys.h"
#include "attention/kernels/block_attention/paths.h"
#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/masked_softmax.h"

namespace birkhoff {

at::Tensor attend_reference(const BlockAttention& in) {
  ListedKeys keys = list_keys(in);
  for (at::Tensor* each : {&keys.k_BHNWD, &keys.v_BHNWD, &keys.mask_BHNbW, &keys.bias_BHNbW}) {
    *each = to_query_heads(*each, in.q_BHNbD.size(1));
  }
  at::Tensor scores_BHNbW = at::matmul(in.q_BHNbD, keys.k_BHNWD.transpose(-1, -2)), rows_bW;
  if (in.relative.defined()) {
    rows_bW = table_rows(in.relative, keys.distance_bW);
    scores_BHNbW = scores_BHNbW + relative_scores(in.relative, in.q_BHNbD, rows_bW)
                                      .masked_fill(keys.in_place_W.logical_not(), 0);
  }
  scores_BHNbW = scores_BHNbW * (1 / std::sqrt(static_cast<double>(in.q_BHNbD.size(4))));
  if (keys.bias_BHNbW.defined()) scores_BHNbW = scores_BHNbW + keys.bias_BHNbW;
  const std::int64_t num_softmaxes = in.one_softmax ? 1 : static_cast<std::int64_t>(in.keys.size());
  const auto in_parts = [&](const at::Tensor& x) {
    return x.defined() ? x.unflatten(-1, {num_softmaxes, -1}) : x;
  };
  const at::Tensor sink = in.sink_H.defined() ? in.sink_H.view({1, -1, 1, 1, 1, 1}) : in.sink_H;
  const at::Tensor p_BHNbW = drop_probabilities(
      masked_softmax(in_parts(scores_BHNbW), in_parts(keys.mask_BHNbW), sink).flatten(-2, -1),
      in.dropout, in.noise);
  const at::Tensor out_BHNbD = at::matmul(p_BHNbW, keys.v_BHNWD);
  if (!in.relative.values_HRD.defined()) return out_BHNbD;
  return out_BHNbD + relative_values(in.relative,
                                     p_BHNbW.masked_fill(keys.in_place_W.logical_not(), 0),
                                     rows_bW);
}

}  // namespace birkhoff
