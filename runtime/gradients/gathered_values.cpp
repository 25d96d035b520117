#include "runtime/gradients/gathered_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/tensors/tensor_memory.h"

namespace birkhoff {

GatheredValues::GatheredValues(ProcessGroup& group, std::vector<GradBucket>& buckets,
                               std::vector<std::vector<std::size_t>> buckets_of,
                               TensorMemory& memory)
    : group_(group),
      buckets_(buckets),
      buckets_of_(std::move(buckets_of)),
      memory_(memory),
      residences_(buckets.size()) {}

std::vector<std::size_t> GatheredValues::buckets_of(const std::vector<int>& units) const {
  std::vector<std::size_t> all;
  for (const int unit : units) {
    // The first unit has a predecessor, the last a successor, and a unit may have no parameters.
    if (unit < 0 || unit >= static_cast<int>(buckets_of_.size())) continue;
    const auto& some = buckets_of_[static_cast<std::size_t>(unit)];
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

std::vector<std::size_t> GatheredValues::buckets_of(std::optional<int> unit) const {
  return unit ? buckets_of(std::vector<int>{*unit}) : std::vector<std::size_t>();
}

void GatheredValues::begin_use(const std::vector<int>& units) {
  // A part inside another one says nothing about the order of parts.
  std::optional<int> next;
  if (num_uses_++ == 0) {
    next = units.front() + (backward_ ? -1 : 1);
    // A part that is recomputed: those behind it are done (use_in_backward()).
    for (Residence& residence : residences_) residence.in_backward = false;
  }
  for (const std::size_t bucket : buckets_of(units)) ++residences_[bucket].uses;
  gather(units, next);
}

void GatheredValues::end_use(const std::vector<int>& units) {
  --num_uses_;
  for (const std::size_t bucket : buckets_of(units)) --residences_[bucket].uses;
}

void GatheredValues::use_in_backward(const std::vector<int>& units) {
  require(backward_, "use_in_backward: within a backward pass");
  // Autograd runs the nodes that were recorded last first, so those of the parts behind this one
  // are done.
  for (Residence& residence : residences_) residence.in_backward = false;
  for (const std::size_t bucket : buckets_of(units)) residences_[bucket].in_backward = true;
  gather(units, units.front() - 1);
}

void GatheredValues::start_gather(std::size_t bucket) {
  const GradBucket& of = buckets_[bucket];
  if (has_memory(of.values)) return;
  memory_.take(of.values);
  residences_[bucket].gather =
      group_.all_gather_async(of.values, of.own_values, fmt::format("values of bucket {}", bucket));
}

void GatheredValues::gather(const std::vector<int>& units, std::optional<int> next) {
  free_idle(next);
  const std::vector<std::size_t> needed = buckets_of(units);
  for (const std::size_t bucket : needed) start_gather(bucket);
  for (const std::size_t bucket : buckets_of(next)) start_gather(bucket);
  for (const std::size_t bucket : needed) {
    if (auto work = std::move(residences_[bucket].gather); work != nullptr) work->wait();
  }
}

void GatheredValues::free_idle(std::optional<int> next) {
  const std::vector<std::size_t> kept = buckets_of(next);
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    Residence& residence = residences_[bucket];
    if (!residence.idle() || !has_memory(buckets_[bucket].values)) continue;
    if (std::ranges::find(kept, bucket) != kept.end()) continue;
    if (auto work = std::move(residence.gather); work != nullptr) work->wait();
    memory_.free(buckets_[bucket].values);
  }
}

void GatheredValues::end_backward() {
  backward_ = false;
  for (Residence& residence : residences_) residence.in_backward = false;
}

void GatheredValues::forget() {
  require(num_uses_ == 0, "values change between passes");
  free_idle();
}

}  // namespace birkhoff
