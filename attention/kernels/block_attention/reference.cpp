#include <ATen/ATen.h>

#include <cmath>

#include "attention/kernels/block_attention/listed_keys.h"
#include "attention/kernels/block_attention/paths.h"
#include "attention/kernels/common/masked_softmax.h"

namespace birkhoff {

at::Tensor attend_reference(const BlockAttention& in) {
  const ListedKeys keys = list_keys(in);
  at::Tensor scores_BHNbW = at::matmul(in.q_BHNbD, keys.k_BHNWD.transpose(-1, -2)) *
                            (1 / std::sqrt(static_cast<double>(in.q_BHNbD.size(4))));
  if (keys.bias_BHNbW.defined()) scores_BHNbW = scores_BHNbW + keys.bias_BHNbW;
  const std::int64_t num_softmaxes = in.one_softmax ? 1 : static_cast<std::int64_t>(in.keys.size());
  const auto in_parts = [&](const at::Tensor& x) {
    return x.defined() ? x.unflatten(-1, {num_softmaxes, -1}) : x;
  };
  const at::Tensor p_BHNbW =
      masked_softmax(in_parts(scores_BHNbW), in_parts(keys.mask_BHNbW)).flatten(-2, -1);
  return at::matmul(drop_probabilities(p_BHNbW, in.dropout, in.noise), keys.v_BHNWD);
}

}  // namespace birkhoff
