#include "models/transformer/multi_head_attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/split_with_sizes.h>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "configs/config.pb.h"

namespace birkhoff {
namespace {

// Heads are split and joined by these numbers everywhere else.
void check_heads(const configs::Attention& attention, std::int64_t heads,
                 const std::string& field) {
  std::int64_t sum = 0;
  for (const configs::HeadGroup& group : attention.group()) sum += group.heads();
  if (sum != heads) {
    fail(ExitCode::kConfig, "{}: its groups have {} together, model.heads is {}", field,
         counted(sum, "head"), heads);
  }
  if (attention.group_size() > static_cast<int>(kMostHeadGroups)) {
    fail(ExitCode::kConfig, "{}: {} groups; at most {} are allowed", field, attention.group_size(),
         kMostHeadGroups);
  }
}

// The messages of a mechanism name its own fields. The user needs the path from the root of the
// configuration.
std::unique_ptr<Mechanism> make_group_mechanism(const configs::Mechanism& config,
                                                const MechanismShape& shape,
                                                const std::string& field, const std::string& name,
                                                Parameters& parameters,
                                                const ParallelGroups& parallel) {
  try {
    return make_mechanism(config, shape, name, parameters, parallel);
  } catch (const Error& error) {
    throw Error(error.code(), field + ".mechanism: " + error.what());
  }
}

}  // namespace

MultiHeadAttention::MultiHeadAttention(const configs::Model& config,
                                       const configs::Attention& attention,
                                       const std::string& field, std::int64_t layer,
                                       std::int64_t sequence_length, bool causal,
                                       const std::string& name, Parameters& parameters,
                                       const ParallelGroups& parallel)
    : layer_(layer), head_dim_(config.channels() / config.heads()) {
  check_heads(attention, config.heads(), field);
  std::int64_t value_heads = 0;
  for (int g = 0; g < attention.group_size(); ++g) {
    HeadGroup group;
    group.name = name + ".groups." + std::to_string(g);
    group.heads = attention.group(g).heads();
    const MechanismShape shape{.channels = config.channels(),
                               .heads = group.heads,
                               .head_dim = head_dim_,
                               .sequence_length = sequence_length,
                               .causal = causal};
    group.mechanism = make_group_mechanism(attention.group(g).mechanism(), shape,
                                           field + ".group." + std::to_string(g), group.name,
                                           parameters, parallel);
    group.has_value = !group.mechanism->traits().ties_key_value;
    value_heads += group.has_value ? group.heads : 0;
    head_groups_.push_back(std::move(group));
  }
  query_key_value_.emplace(config, WeightRole::kInner, config.channels(),
                           2 * config.channels() + value_heads * head_dim_,
                           name + ".query_key_value", parameters);
  output_.emplace(config, WeightRole::kResidual, config.channels(), config.channels(),
                  name + ".output", parameters);
}

std::vector<AttentionInput> MultiHeadAttention::project(const at::Tensor& x_BTC,
                                                        const SequenceContext& context) const {
  const std::int64_t batch = x_BTC.size(0), tokens = x_BTC.size(1);
  // A single split: its gradient is one concatenation, whereas the gradients of separate slices
  // would fill and add whole tensors.
  std::vector<std::int64_t> widths;
  for (const HeadGroup& group : head_groups_) widths.push_back(group.heads * head_dim_);
  for (const HeadGroup& group : head_groups_) widths.push_back(group.heads * head_dim_);
  for (const HeadGroup& group : head_groups_) {
    if (group.has_value) widths.push_back(group.heads * head_dim_);
  }
  const std::vector<at::Tensor> pieces =
      at::split_with_sizes((*query_key_value_)(x_BTC), widths, -1);
  const auto heads_first = [&](const at::Tensor& piece, const HeadGroup& group) {
    return piece.view({batch, tokens, group.heads, head_dim_}).transpose(1, 2);
  };

  const std::size_t num_groups = head_groups_.size();
  std::size_t next_value = 2 * num_groups;
  std::vector<AttentionInput> inputs(num_groups);
  for (std::size_t g = 0; g < num_groups; ++g) {
    const HeadGroup& group = head_groups_[g];
    AttentionInput& in = inputs[g];
    in.q_BHLD = heads_first(pieces[g], group);
    in.k_BHSD = heads_first(pieces[num_groups + g], group);
    in.v_BHSD = group.has_value ? heads_first(pieces[next_value++], group) : in.k_BHSD;
    in.x_q_BLC = in.x_kv_BSC = x_BTC;
    in.key_lengths_B = context.lengths_B;
    in.segments_q_BL = in.segments_kv_BS = context.segments_BT;
    in.positions_q_BLP = in.positions_kv_BSP = context.positions_BTP;
  }
  return inputs;
}

at::Tensor MultiHeadAttention::join(const std::vector<at::Tensor>& out_BHTD) const {
  std::vector<at::Tensor> out_BTC;
  for (const at::Tensor& out : out_BHTD) {
    out_BTC.push_back(out.transpose(1, 2).flatten(2));
  }
  return (*output_)(out_BTC.size() == 1 ? out_BTC.front() : at::cat(out_BTC, -1));
}

at::Tensor MultiHeadAttention::forward(const at::Tensor& x_BTC, const SequenceContext& context,
                                       const std::optional<NoiseKey>& noise,
                                       NamedSums& sums) const {
  std::vector<AttentionInput> inputs = project(x_BTC, context);
  std::vector<at::Tensor> out_BHTD;
  for (std::size_t g = 0; g < inputs.size(); ++g) {
    const HeadGroup& group = head_groups_[g];
    if (noise) {
      inputs[g].noise = noise->at_layer(noise_layer(layer_, RandomStream::kHeadGroup, g));
    }
    AttentionOutput output = group.mechanism->attend(inputs[g], Path::kFused);
    out_BHTD.push_back(std::move(output.out_BHLD));
    for (auto& [name, value] : output.sums) {
      sums.emplace_back(group.name + "." + name, std::move(value));
    }
  }
  return join(out_BHTD);
}

std::vector<std::unique_ptr<DecodeState>> MultiHeadAttention::decode_state(
    std::int64_t batch) const {
  std::vector<std::unique_ptr<DecodeState>> states;
  for (const HeadGroup& group : head_groups_) {
    states.push_back(group.mechanism->decode_state(batch));
  }
  return states;
}

at::Tensor MultiHeadAttention::decode_step(std::vector<std::unique_ptr<DecodeState>>& states,
                                           const at::Tensor& x_BTC,
                                           const SequenceContext& context) const {
  const std::vector<AttentionInput> inputs = project(x_BTC, context);
  std::vector<at::Tensor> out_BHTD;
  for (std::size_t g = 0; g < inputs.size(); ++g) {
    out_BHTD.push_back(head_groups_[g].mechanism->decode_step(*states[g], inputs[g]));
  }
  return join(out_BHTD);
}

double MultiHeadAttention::forward_flops(std::int64_t num_tokens) const {
  double flops = static_cast<double>(num_tokens) * (query_key_value_->flops() + output_->flops());
  for (const HeadGroup& group : head_groups_) flops += group.mechanism->forward_flops(num_tokens);
  return flops;
}

std::vector<Figure> MultiHeadAttention::figures() const {
  std::vector<Figure> result;
  for (const HeadGroup& group : head_groups_) {
    for (const Figure& figure : group.mechanism->traits().figures) {
      result.push_back(with_prefix(group.name + ".", figure));
    }
  }
  return result;
}

std::vector<std::string> MultiHeadAttention::warnings() const {
  std::vector<std::string> result;
  for (const HeadGroup& group : head_groups_) {
    const std::string leak = group.mechanism->traits().leak;
    if (!leak.empty()) result.push_back(group.name + ": " + leak);
  }
  return result;
}

}  // namespace birkhoff
