#include "attention/kernels/gathered_attention/parts.h"

#include <ATen/ATen.h>

namespace birkhoff {

AttentionPart with_sink(const AttentionPart& part, const at::Tensor& sink_H) {
  const at::Tensor sink_H1 = sink_H.to(part.sum_BHL.scalar_type()).unsqueeze(1);
  const at::Tensor max_BHL = at::maximum(part.max_BHL.detach(), sink_H1.detach());
  const at::Tensor keys_BHL = part.sum_BHL * (part.max_BHL.detach() - max_BHL).exp();
  const at::Tensor sees_no_key = part.sum_BHL == 0;
  const at::Tensor sum_BHL = (keys_BHL + (sink_H1 - max_BHL).exp()).masked_fill(sees_no_key, 0);
  const at::Tensor share_BHL = keys_BHL / sum_BHL.masked_fill(sees_no_key, 1);
  return {(part.out_BHLD * share_BHL.unsqueeze(3)).to(part.out_BHLD.scalar_type()),
          max_BHL.masked_fill(at::logical_or(sees_no_key, sum_BHL.ne(sum_BHL)), 0), sum_BHL};
}

}  // namespace birkhoff
