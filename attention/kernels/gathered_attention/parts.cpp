#include "attention/kernels/gathered_attention/parts.h"

#include <ATen/ATen.h>

#include <limits>

namespace birkhoff {

AttentionPart merge_parts(const std::vector<AttentionPart>& parts) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::vector<at::Tensor> maxima_BHL, sums_BHL;
  for (const AttentionPart& part : parts) {
    maxima_BHL.push_back(part.max_BHL.detach().masked_fill(part.sum_BHL == 0, -kInfinity));
  }
  at::Tensor max_BHL = maxima_BHL.front(), sum_BHL, out_BHLD;
  for (const at::Tensor& each : maxima_BHL) max_BHL = at::maximum(max_BHL, each);
  max_BHL = max_BHL.masked_fill(max_BHL == -kInfinity, 0);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    sums_BHL.push_back((maxima_BHL[p] - max_BHL).exp() * parts[p].sum_BHL);
    sum_BHL = sum_BHL.defined() ? sum_BHL + sums_BHL[p] : sums_BHL[p];
  }
  const at::Tensor divisor_BHL = sum_BHL.masked_fill(sum_BHL == 0, 1);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const at::Tensor share_BHL1 = (sums_BHL[p] / divisor_BHL).unsqueeze(3);
    const at::Tensor out_of_part = parts[p].out_BHLD * share_BHL1;
    out_BHLD = out_BHLD.defined() ? out_BHLD + out_of_part : out_of_part;
  }
  return {out_BHLD.to(parts.front().out_BHLD.scalar_type()),
          max_BHL.masked_fill(sum_BHL.ne(sum_BHL), 0), sum_BHL};
}

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
