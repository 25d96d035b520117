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

std::string find_non_finite(const std::vector<TensorPart>& shards) {
  std::vector<const TensorPart*> checked;
  std::vector<at::Tensor> finite;
  for (const TensorPart& shard : shards) {
    if (!shard.data.is_floating_point() || shard.data.numel() == 0) continue;
    const at::Tensor flag = all_finite(shard.data);
    if (flag.is_cpu()) {  // also on a GPU's rank, whose optimizer may count on the host
      if (!flag.item<bool>()) return shard.name;
      continue;
    }
    checked.push_back(&shard);
    finite.push_back(flag);
  }
  if (finite.empty()) return "";
  const at::Tensor flags = at::stack(finite).cpu();  // one wait for the device
  for (std::size_t i = 0; i < checked.size(); ++i) {
    if (!flags.const_data_ptr<bool>()[i]) return checked[i]->name;
  }
  return "";
}

std::string find_non_finite(const std::vector<TensorPart>& shards, ProcessGroup& world) {
  std::vector<TensorPart> mine;
  std::copy_if(shards.begin(), shards.end(), std::back_inserter(mine),
               [&](const TensorPart& shard) { return shard.owner == world.rank(); });
  const std::string found = find_non_finite(mine);
  for (std::string& name : world.all_gather_bytes(found, "state that is not finite")) {
    if (!name.empty()) return std::move(name);
  }
  return "";
}

}  // namespace birkhoff
