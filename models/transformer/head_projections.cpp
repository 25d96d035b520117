#include "models/transformer/head_projections.h"

#include <ATen/ops/split_with_sizes.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

HeadProjections::HeadProjections(const configs::Model& config, std::vector<GroupProjections> groups,
                                 KeySource source, const InputWidths& inputs,
                                 const std::string& name, Parameters& parameters)
    : head_dim_(head_width(config)), groups_(std::move(groups)) {
  const auto add = [&](std::optional<Linear>& linear, const char* kind, bool with_queries,
                       bool with_keys) {
    std::vector<std::int64_t> all = widths(with_queries, with_keys);
    for (std::int64_t& width : all) width *= parameters.place().tensor_size;
    linear.emplace(config, WeightRole::kInner, with_queries ? inputs.queries : inputs.keys,
                   std::accumulate(all.begin(), all.end(), std::int64_t{0}), name + kind,
                   parameters, LinearSplit::kOutputs, all);
  };
  if (source == KeySource::kOwnSequence) {
    add(query_key_value_, ".query_key_value", /*with_queries=*/true, /*with_keys=*/true);
    return;
  }
  if (!std::ranges::all_of(groups_, &GroupProjections::has_key)) {
    fail(ExitCode::kInternal, "{}: heads without keys of their own cannot read a memory", name);
  }
  add(query_, ".query", /*with_queries=*/true, /*with_keys=*/false);
  add(key_value_, ".key_value", /*with_queries=*/false, /*with_keys=*/true);
}

std::vector<std::int64_t> HeadProjections::widths(bool with_queries, bool with_keys) const {
  std::vector<std::int64_t> widths;
  const auto add = [&](std::int64_t heads, bool exists) {
    if (exists) widths.push_back(heads * head_dim_);
  };
  for (const GroupProjections& group : groups_) add(group.heads, with_queries);
  for (const GroupProjections& group : groups_) add(group.key_heads, with_keys && group.has_key);
  for (const GroupProjections& group : groups_) add(group.key_heads, with_keys && group.has_value);
  return widths;
}

std::int64_t HeadProjections::query_width() const {
  const std::vector<std::int64_t> of_groups = widths(/*with_queries=*/true, /*with_keys=*/false);
  return std::accumulate(of_groups.begin(), of_groups.end(), std::int64_t{0});
}

HeadProjections::Heads HeadProjections::split(const at::Tensor& outputs, bool with_queries,
                                              bool with_keys) const {
  // A single split: its gradient is one concatenation, whereas the gradients of separate slices
  // would fill and add whole tensors.
  const std::vector<at::Tensor> pieces =
      at::split_with_sizes(outputs, widths(with_queries, with_keys), -1);
  auto piece = pieces.begin();
  const auto next_heads = [&] { return (piece++)->unflatten(-1, {-1, head_dim_}).transpose(1, 2); };
  Heads heads;
  for (std::size_t g = 0; with_queries && g < groups_.size(); ++g) {
    heads.q_BHTD.push_back(next_heads());
  }
  for (std::size_t g = 0; with_keys && g < groups_.size(); ++g) {
    heads.k_BHTD.push_back(groups_[g].has_key ? next_heads() : heads.q_BHTD[g]);
  }
  for (std::size_t g = 0; with_keys && g < groups_.size(); ++g) {
    heads.v_BHTD.push_back(groups_[g].has_value ? next_heads() : heads.k_BHTD[g]);
  }
  return heads;
}

std::pair<HeadProjections::Heads, at::Tensor> HeadProjections::all(
    const at::Tensor& x_BTC, const TokenSlices& tokens) const {
  const auto [y, x] = query_key_value_->gathered(x_BTC, tokens);
  return {split(y, /*with_queries=*/true, /*with_keys=*/true), x};
}

HeadProjections::Heads HeadProjections::earlier_keys_and_values(const at::Tensor& past_BMC) const {
  require(std::ranges::all_of(groups_, &GroupProjections::has_key),
          "heads without keys of their own see no earlier tokens");
  return split(query_key_value_->outputs_from(query_width(), past_BMC), /*with_queries=*/false,
               /*with_keys=*/true);
}

std::pair<HeadProjections::Heads, at::Tensor> HeadProjections::queries(
    const at::Tensor& x_BTC, const TokenSlices& tokens) const {
  const auto [y, x] = query_->gathered(x_BTC, tokens);
  return {split(y, /*with_queries=*/true, /*with_keys=*/false), x};
}

std::pair<HeadProjections::Heads, at::Tensor> HeadProjections::keys_and_values(
    const at::Tensor& memory_BSC, const TokenSlices& tokens) const {
  const auto [y, x] = key_value_->gathered(memory_BSC, tokens);
  return {split(y, /*with_queries=*/false, /*with_keys=*/true), x};
}

double HeadProjections::flops(std::int64_t num_queries, std::int64_t num_keys) const {
  const auto queries = static_cast<double>(num_queries), keys = static_cast<double>(num_keys);
  if (query_key_value_) {
    const std::vector<std::int64_t> all = widths(/*with_queries=*/true, /*with_keys=*/true);
    const auto width =
        static_cast<double>(std::accumulate(all.begin(), all.end(), std::int64_t{0}));
    return query_key_value_->flops() *
           (queries + (keys - queries) * (1 - static_cast<double>(query_width()) / width));
  }
  return queries * query_->flops() + keys * key_value_->flops();
}

}  // namespace birkhoff
