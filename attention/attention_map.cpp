#include "attention/attention_map.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace birkhoff {

at::Tensor attention_map(const Mechanism& mechanism, const AttentionInput& in) {
  const at::NoGradGuard no_gradients;
  const auto wide = [](const at::Tensor& x) {
    return x.detach().to(at::toOpMathType(x.scalar_type()));
  };
  AttentionInput probe = in;
  probe.q_BHLD = wide(in.q_BHLD);
  // Heads that share queries and keys get the same tensor.
  probe.k_BHSD = in.k_BHSD.is_same(in.q_BHLD) ? probe.q_BHLD : wide(in.k_BHSD);
  probe.x_q_BLC = wide(in.x_q_BLC);
  probe.x_kv_BSC = wide(in.x_kv_BSC);
  probe.first_x_BNC.reset();
  probe.noise.reset();
  probe.v_BHSD = at::zeros(in.v_BHSD.sizes(), probe.q_BHLD.options());
  const auto outputs = [&] { return mechanism.attend(probe, Path::kReference).out_BHLD; };
  const at::Tensor constant_BHLD = outputs();
  const std::int64_t S = in.v_BHSD.size(2), D = in.v_BHSD.size(3);
  std::vector<at::Tensor> columns;
  for (std::int64_t first = 0; first < S; first += D) {
    const std::int64_t count = std::min(D, S - first);
    probe.v_BHSD = at::zeros_like(probe.v_BHSD);
    probe.v_BHSD.narrow(2, first, count).narrow(3, 0, count).diagonal(0, 2, 3).fill_(1);
    columns.push_back((outputs() - constant_BHLD).narrow(3, 0, count));
  }
  return at::cat(columns, 3);
}

}  // namespace birkhoff
