#include "attention/kernels/gathered_attention/parts.h"

#include <ATen/ATen.h>

#include <limits>

#include "cluster/base/error.h"

namespace birkhoff {

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
