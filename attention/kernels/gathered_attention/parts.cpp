#include "attention/kernels/gathered_attention/parts.h"

#include <ATen/ATen.h>

#include <limits>

#include "cluster/base/error.h"

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

AttentionPart merge_parts(const std::vector<AttentionPart>& parts) {
  require(!parts.empty(), "merge_parts: there is no part");
  std::vector<at::Tensor> maxima;
  for (const AttentionPart& part : parts) {
    require(part.out_BHLD.sizes() == parts[0].out_BHLD.sizes() &&
                part.sum_BHL.sizes() == parts[0].sum_BHL.sizes(),
            "merge_parts: the parts have different queries");
    maxima.push_back(part.max_BHL.detach().masked_fill(part.sum_BHL == 0,
                                                       -std::numeric_limits<double>::infinity()));
  }
  at::Tensor max_BHL = at::stack(maxima).amax(0);
  max_BHL = max_BHL.masked_fill(max_BHL == -std::numeric_limits<double>::infinity(), 0);
  at::Tensor out_BHLD, sum_BHL;
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const at::Tensor weight_BHL = (maxima[p] - max_BHL).exp() * parts[p].sum_BHL;
    const at::Tensor weighted_BHLD = weight_BHL.unsqueeze(3) * parts[p].out_BHLD;
    out_BHLD = out_BHLD.defined() ? out_BHLD + weighted_BHLD : weighted_BHLD;
    sum_BHL = sum_BHL.defined() ? sum_BHL + weight_BHL : weight_BHL;
  }
  const at::Tensor divisor_BHL1 = sum_BHL.masked_fill(sum_BHL == 0, 1).unsqueeze(3);
  return {(out_BHLD / divisor_BHL1).to(parts[0].out_BHLD.scalar_type()),
          max_BHL.masked_fill(sum_BHL.isnan(), 0), sum_BHL};
}

}  // namespace birkhoff
