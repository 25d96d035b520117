#include <ATen/ATen.h>

#include "attention/kernels/block_attention/listed_keys.h"
#include "attention/kernels/block_attention/paths.h"
#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/masked_softmax.h"

namespace birkhoff {
namespace {

// Makes [B, H, N, w, x] a batch of B N: [B N, H, w, x].
at::Tensor blocks_to_batch(const at::Tensor& x) {
  const at::Tensor x_BNHwx = x.transpose(1, 2);
  return x_BNHwx.reshape({-1, x.size(1), x.size(3), x.size(4)});
}

at::Tensor attend_with_one_softmax(const BlockAttention& in) {
  const std::int64_t B = in.q_BHNbD.size(0), N = in.q_BHNbD.size(2);
  const KeyBlocks& first = in.keys[0];
  const bool own_past_alone = in.keys.size() == 1 && first.window.causal &&
                              first.window.is_own_block() && !first.mask_BHNbb[0].defined();
  ListedKeys keys;
  if (own_past_alone) {
    keys = {first.k_BHNbD, first.v_BHNbD, {}, {}};
  } else {
    keys = list_keys(in);
  }
  std::optional<at::Tensor> mask;
  at::Tensor seeing;
  if (keys.mask_BHNbW.defined()) {
    keys.mask_BHNbW = to_query_heads(keys.mask_BHNbW, in.q_BHNbD.size(1));
    mask = blocks_to_batch(additive_mask(keys.mask_BHNbW, in.q_BHNbD.scalar_type()));
    seeing = keys.mask_BHNbW.any(-1, /*keepdim=*/true);
  }
  const at::Tensor out_BHNbD =
      library_attention(blocks_to_batch(in.q_BHNbD), blocks_to_batch(keys.k_BHNWD),
                        blocks_to_batch(keys.v_BHNWD), mask, own_past_alone)
          .unflatten(0, {B, N})
          .transpose(1, 2);
  // The check is cheap only on the CPU: elsewhere the host would wait for the device.
  if (!seeing.defined() || (seeing.is_cpu() && seeing.all().item<bool>())) return out_BHNbD;
  return out_BHNbD.masked_fill(seeing.logical_not(), 0);
}

}  // namespace

at::Tensor attend_sdpa(const BlockAttention& in) {
  if (in.one_softmax) return attend_with_one_softmax(in);
  at::Tensor out_BHNbD;
  for (const KeyBlocks& keys : in.keys) {
    BlockAttention one = in;
    one.keys = {keys};
    const at::Tensor part = attend_with_one_softmax(one);
    out_BHNbD = out_BHNbD.defined() ? out_BHNbD + part : part;
  }
  return out_BHNbD;
}

}  // namespace birkhoff
