#include "runtime/carried_past.h"

#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "data/batch/partition.h"
#include "models/model.h"

namespace birkhoff {

CarriedPast::CarriedPast(const configs::Config& config, Model& model, const ProcessGroup& group,
                         std::int64_t samples_per_epoch)
    : global_batch_(config.train().global_batch()),
      steps_per_epoch_(samples_per_epoch / global_batch_),
      sequence_length_(config.data().sequence_length()),
      owner_(group.rank()) {
  std::vector<std::int64_t> shape = model.past_shape();
  if (shape.empty()) return;
  require(samples_per_epoch % global_batch_ == 0, "parts of equal length");
  const Interval rows =
      rank_share(global_batch_, config.train().invariant().shards(), group.rank(), group.size());
  first_row_ = rows.begin;
  shape.insert(shape.begin(), rows.size());
  tokens_BNMC = at::zeros(
      shape, at::TensorOptions(model.parameters().dtype()).device(model.parameters().device()));
}

void CarriedPast::attach(Batch& batch, std::int64_t consumed) const {
  if (!tokens_BNMC.defined()) return;
  const std::int64_t step = consumed / global_batch_ % steps_per_epoch_;
  const std::int64_t most = tokens_BNMC.size(2), count = std::min(most, step * sequence_length_);
  batch.fields.erase(std::string(field::kPast));
  if (count > 0) batch.fields.emplace(field::kPast, tokens_BNMC.narrow(2, most - count, count));
}

void CarriedPast::advance(const at::Tensor& next_BNMC) {
  if (!tokens_BNMC.defined() || !next_BNMC.defined()) return;
  const std::int64_t count = next_BNMC.size(2);
  tokens_BNMC.narrow(2, tokens_BNMC.size(2) - count, count)
      .copy_(at::nan_to_num(next_BNMC, 0.0, 0.0, 0.0));
}

std::vector<TensorPart> CarriedPast::parts() const {
  if (!tokens_BNMC.defined()) return {};
  std::vector<std::int64_t> all = tokens_BNMC.sizes().vec();
  all[0] = global_batch_;
  const std::int64_t row = c10::multiply_integers(all) / global_batch_;
  const TensorPlacement whole{.global_shape = all,
                              .boxes = {{std::vector<std::int64_t>(all.size(), 0), all}}};
  std::vector<TensorPart> parts = placed_parts(
      "memory", StateKind::kPast, whole, {first_row_ * row, first_row_ * row + tokens_BNMC.numel()},
      tokens_BNMC.view({-1}));
  for (TensorPart& part : parts) {
    part.owner = owner_;
    part.replicated = false;
  }
  return parts;
}

}  // namespace birkhoff
