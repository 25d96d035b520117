#include "runtime/checkpoint/finite_state.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>

#include <iterator>

namespace birkhoff {
namespace {

// Whether all values are finite, as a tensor on their device. The extremes are NaN if any value is,
// and need no memory.
at::Tensor all_finite(const at::Tensor& data) {
  const auto [low, high] = at::aminmax(data);
  return at::isfinite(low).logical_and(at::isfinite(high));
}

}  // namespace

std::string find_non_finite(const std::vector<TensorPart>& parts) {
  std::vector<const TensorPart*> checked;
  std::vector<at::Tensor> finite;
  for (const TensorPart& part : parts) {
    if (!part.data.is_floating_point() || part.data.numel() == 0) continue;
    const at::Tensor flag = all_finite(part.data);
    if (flag.is_cpu()) {  // also on a GPU's rank, whose optimizer may count on the host
      if (!flag.item<bool>()) return part.name;
      continue;
    }
    checked.push_back(&part);
    finite.push_back(flag);
  }
  if (finite.empty()) return "";
  const at::Tensor flags = at::stack(finite).cpu();  // one wait for the device
  for (std::size_t i = 0; i < checked.size(); ++i) {
    if (!flags.const_data_ptr<bool>()[i]) return checked[i]->name;
  }
  return "";
}

std::string find_non_finite(const std::vector<TensorPart>& parts, ProcessGroup& world) {
  std::vector<TensorPart> mine;
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(mine),
               [&](const TensorPart& part) { return part.owner == world.rank(); });
  const std::string found = find_non_finite(mine);
  for (std::string& name : world.all_gather_bytes(found, "state that is not finite")) {
    if (!name.empty()) return std::move(name);
  }
  return "";
}

}  // namespace birkhoff
