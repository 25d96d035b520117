#include "runtime/optimizers/optimizer.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "runtime/optimizers/adafactor.h"
#include "runtime/optimizers/fused_optimizer.h"

namespace birkhoff {

std::vector<TensorPart> owned_parts(const GradBuckets& buckets, const GradBucket& bucket,
                                    const GradBucket::Slot& slot, const std::string& name,
                                    StateKind kind, const at::Tensor& own_n) {
  std::vector<TensorPart> parts;
  const Interval owned = bucket.owned;
  const auto add = [&](std::int64_t begin, std::int64_t end, int owner) {
    const at::Tensor data = own_n.narrow(0, begin < end ? begin - owned.begin : 0, end - begin);
    for (TensorPart& part :
         placed_parts(name, kind, slot.placement, {begin - slot.offset, end - slot.offset}, data)) {
      part.owner = owner;
      part.replicated = !buckets.sliced();
      parts.push_back(std::move(part));
    }
  };
  const std::int64_t slice = bucket.elements() / buckets.slice_group().size();
  const std::int64_t last = std::min(owned.end, slot.offset + slot.elements);
  for (std::int64_t begin = std::max(owned.begin, slot.offset); begin < last;) {
    const int owner = buckets.owner(bucket, begin);
    const std::int64_t end = std::min(last, (begin / slice + 1) * slice);
    add(begin, end, owner);
    begin = end;
  }
  // Names a tensor even if this rank holds nothing of it (load_checkpoint).
  if (parts.empty()) add(slot.offset, slot.offset, 0);
  return parts;
}

std::unique_ptr<Optimizer> make_optimizer(const configs::Optimizer& config, GradBuckets& buckets) {
  switch (config.kind_case()) {
    case configs::Optimizer::kAdamw:
    case configs::Optimizer::KIND_NOT_SET:
      return std::make_unique<FusedOptimizer<AdamWRule>>(
          AdamWRule{config.adamw().beta1(), config.adamw().beta2(), config.adamw().epsilon(),
                    config.adamw().weight_decay()},
          buckets);
    case configs::Optimizer::kSgd:
      return std::make_unique<FusedOptimizer<SgdRule>>(
          SgdRule{config.sgd().momentum(), config.sgd().weight_decay(), config.sgd().nesterov()},
          buckets);
    case configs::Optimizer::kAdafactor:
      return std::make_unique<Adafactor>(config.adafactor(), buckets);
  }
  require(false, "an optimizer of the schema");
  return nullptr;
}

}  // namespace birkhoff
