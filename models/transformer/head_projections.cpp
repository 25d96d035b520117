#include "models/transformer/head_projections.h"

#include <ATen/ops/split_with_sizes.h>

#include <utility>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

HeadProjections::HeadProjections(const configs::Model& config, std::vector<GroupProjections> groups,
                                 KeySource source, const std::string& name, Parameters& parameters)
    : head_dim_(config.channels() / config.heads()), groups_(std::move(groups)) {
  std::int64_t query_heads = 0, key_heads = 0, value_heads = 0;
  bool all_have_keys = true;
  for (const GroupProjections& group : groups_) {
    query_heads += group.heads;
    key_heads += group.has_key ? group.key_heads : 0;
    value_heads += group.has_value ? group.key_heads : 0;
    all_have_keys = all_have_keys && group.has_key;
  }
  const std::int64_t C = config.channels(), queries = query_heads * head_dim_,
                     keys_and_values = (key_heads + value_heads) * head_dim_;
  if (source == KeySource::kOwnSequence) {
    query_key_value_.emplace(config, WeightRole::kInner, C, queries + keys_and_values,
                             name + ".query_key_value", parameters);
    return;
  }
  if (!all_have_keys) {
    fail(ExitCode::kInternal, "{}: heads without keys of their own cannot read a memory", name);
  }
  query_.emplace(config, WeightRole::kInner, C, queries, name + ".query", parameters);
  key_value_.emplace(config, WeightRole::kInner, C, keys_and_values, name + ".key_value",
                     parameters);
}

HeadProjections::Heads HeadProjections::split(const at::Tensor& outputs, bool with_queries,
                                              bool with_keys) const {
  // A single split: its gradient is one concatenation, whereas the gradients of separate slices
  // would fill and add whole tensors.
  std::vector<std::int64_t> widths;
  const auto add_width = [&](std::int64_t heads, bool exists) {
    if (exists) widths.push_back(heads * head_dim_);
  };
  for (const GroupProjections& group : groups_) add_width(group.heads, with_queries);
  for (const GroupProjections& group : groups_) {
    add_width(group.key_heads, with_keys && group.has_key);
  }
  for (const GroupProjections& group : groups_) {
    add_width(group.key_heads, with_keys && group.has_value);
  }
  const std::vector<at::Tensor> pieces = at::split_with_sizes(outputs, widths, -1);
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

HeadProjections::Heads HeadProjections::all(const at::Tensor& x_BTC) const {
  return split((*query_key_value_)(x_BTC), /*with_queries=*/true, /*with_keys=*/true);
}

HeadProjections::Heads HeadProjections::queries(const at::Tensor& x_BTC) const {
  return split((*query_)(x_BTC), /*with_queries=*/true, /*with_keys=*/false);
}

HeadProjections::Heads HeadProjections::keys_and_values(const at::Tensor& memory_BSC) const {
  return split((*key_value_)(memory_BSC), /*with_queries=*/false, /*with_keys=*/true);
}

double HeadProjections::flops() const {
  double flops = 0;
  for (const std::optional<Linear>* linear : {&query_key_value_, &query_, &key_value_}) {
    if (*linear) flops += (*linear)->flops();
  }
  return flops;
}

}  // namespace birkhoff
