#include "models/transformer/multi_head_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/kernels/block_pool/block_pool.h"
#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "configs/schema/config.pb.h"
#include "models/transformer/forward_record.h"

namespace birkhoff {
namespace {

// The messages of a mechanism name its own fields. The user needs the path from the root of the
// configuration.
std::unique_ptr<Mechanism> make_group_mechanism(const configs::Mechanism& config,
                                                const MechanismShape& shape,
                                                const std::string& field, const std::string& name,
                                                Parameters& parameters) {
  try {
    return make_mechanism(config, shape, name, parameters);
  } catch (const Error& error) {
    throw Error(error.code(), field + ".mechanism: " + error.what());
  }
}

std::optional<SinusoidalOptions> distances_of(const configs::Model& config) {
  if (config.positions() != configs::Model::relative_sinusoidal) return std::nullopt;
  const configs::Memory& memory = config.memory();
  return SinusoidalOptions{
      .evaluation_clamp = memory.evaluation_clamp(),
      .evaluation_window = memory.evaluation_same_length() ? evaluation_memory(config) : 0};
}

// What decoding with cross-attention remembers.
struct MemoryState final : DecodeState {
  void select_rows(const at::Tensor& rows_B) override {
    const bool tied = v_BHSD.is_same(k_BHSD);
    k_BHSD = k_BHSD.index_select(0, rows_B);
    v_BHSD = tied ? k_BHSD : v_BHSD.index_select(0, rows_B);
  }

  at::Tensor k_BHSD, v_BHSD;
};

}  // namespace

MultiHeadAttention::MultiHeadAttention(const configs::Model& config,
                                       const configs::Attention& attention,
                                       const std::string& field, KeySource source,
                                       std::int64_t noise_number, std::int64_t sequence_length,
                                       bool causal, const std::string& name, Parameters& parameters)
    : MultiHeadAttention(config, attention, field, source,
                         Form{.inputs = {config.channels(), config.channels()}}, noise_number,
                         sequence_length, causal, name, parameters) {}

MultiHeadAttention MultiHeadAttention::between_sets(
    const configs::Model& config, const configs::Attention& attention, const std::string& field,
    KeySource source, const InputWidths& inputs, std::int64_t noise_number, std::int64_t num_points,
    const std::string& name, Parameters& parameters) {
  require(parameters.place().tensor_size == 1, "attention between sets is not divided");
  return MultiHeadAttention(config, attention, field, source,
                            Form{.inputs = inputs, .between_sets = true}, noise_number, num_points,
                            /*causal=*/false, name, parameters);
}

MultiHeadAttention::MultiHeadAttention(const configs::Model& config,
                                       const configs::Attention& attention,
                                       const std::string& field, KeySource source, const Form& form,
                                       std::int64_t noise_number, std::int64_t sequence_length,
                                       bool causal, const std::string& name, Parameters& parameters)
    : query_scale_(form.between_sets ? 1 / std::sqrt(static_cast<double>(config.heads())) : 1),
      source_(source),
      noise_number_(noise_number),
      num_ranks_(parameters.place().tensor_size) {
  if (attention.group_size() > static_cast<int>(kMaxHeadGroups)) {
    fail(ExitCode::kConfig, "{}: {} groups; at most {} are allowed", field, attention.group_size(),
         kMaxHeadGroups);
  }
  const ModelPlacement& place = parameters.place();
  std::vector<GroupProjections> projections;
  std::vector<std::int64_t> output_widths;  // of the groups
  for (int g = 0; g < attention.group_size(); ++g) {
    HeadGroup group;
    group.name = name + ".groups." + std::to_string(g);
    const std::int64_t all_heads = attention.group(g).heads(),
                       all_key_heads = attention.group(g).key_heads();
    require(all_heads % place.tensor_size == 0 && all_key_heads % place.tensor_size == 0,
            "the ranks of the tensor axis divide the heads of each group");
    const std::int64_t heads = all_heads / place.tensor_size;
    group.first_head = heads * place.tensor_rank;
    group.all_heads = all_heads;
    const MechanismShape shape{.channels = config.channels(),
                               .heads = heads,
                               .key_heads = all_key_heads / place.tensor_size,
                               .head_dim = head_width(config),
                               .sequence_length = sequence_length,
                               .causal = causal,
                               .distances = distances_of(config)};
    const std::string group_field = field + ".group." + std::to_string(g);
    group.mechanism = make_group_mechanism(attention.group(g).mechanism(), shape, group_field,
                                           group.name, parameters);
    const MechanismTraits traits = group.mechanism->traits();
    if (form.between_sets && !traits.supports_sets) {
      fail(ExitCode::kConfig,
           "{}.mechanism: it is for sequences, and the points of a set have no order; choose dense "
           "or sinkformer",
           group_field);
    }
    if (source_ == KeySource::kMemory && !form.between_sets && !traits.supports_cross_attention) {
      fail(ExitCode::kConfig,
           "{}.mechanism: it attends within one sequence and cannot read an encoder's outputs; "
           "choose one that can, for instance dense",
           group_field);
    }
    projections.push_back({.heads = heads,
                           .key_heads = shape.heads_of_keys(),
                           .has_key = !traits.shares_query_key,
                           .has_value = !traits.ties_key_value});
    output_widths.push_back(all_heads * shape.head_dim);
    head_groups_.push_back(std::move(group));
  }
  projections_.emplace(config, std::move(projections), source_, form.inputs, name, parameters);
  if (form.between_sets) return;
  output_.emplace(config, WeightRole::kResidual, config.heads() * head_width(config),
                  config.channels(), name + ".output", parameters, LinearSplit::kInputs,
                  output_widths);
}

std::vector<AttentionInput> MultiHeadAttention::project(const at::Tensor& x_BTC,
                                                        const SequenceContext& context) const {
  if (source_ == KeySource::kOwnSequence) {
    at::Tensor used_BTC = x_BTC;
    std::vector<at::Tensor> first_BNC(head_groups_.size());
    for (std::size_t g = 0; g < head_groups_.size(); ++g) {
      const std::int64_t block = head_groups_[g].mechanism->first_tokens();
      if (block == 0 || context.tokens.divided() || !x_BTC.requires_grad()) continue;
      FirstTokens taken = first_of_blocks(used_BTC, block);
      used_BTC = std::move(taken.x_BLC);
      first_BNC[g] = std::move(taken.first_BNC);
    }
    auto [heads, x] = projections_->all(used_BTC, context.tokens);
    if (context.past_BMC.defined()) {
      const HeadProjections::Heads earlier =
          projections_->earlier_keys_and_values(context.past_BMC);
      for (std::size_t g = 0; g < head_groups_.size(); ++g) {
        heads.k_BHTD[g] = at::cat({earlier.k_BHTD[g], heads.k_BHTD[g]}, 2);
        heads.v_BHTD[g] = at::cat({earlier.v_BHTD[g], heads.v_BHTD[g]}, 2);
      }
    }
    std::vector<AttentionInput> inputs = inputs_of(heads, x, x, context);
    for (std::size_t g = 0; g < inputs.size(); ++g) inputs[g].first_x_BNC = first_BNC[g];
    return inputs;
  }
  auto [heads, x] = projections_->queries(x_BTC, context.tokens);
  auto [of_memory, x_kv] =
      projections_->keys_and_values(context.memory.x_BSC, context.memory.tokens);
  heads.k_BHTD = std::move(of_memory.k_BHTD);
  heads.v_BHTD = std::move(of_memory.v_BHTD);
  return inputs_of(heads, x, x_kv, context);
}

std::vector<AttentionInput> MultiHeadAttention::inputs_of(const HeadProjections::Heads& heads,
                                                          const at::Tensor& x_BTC,
                                                          const at::Tensor& x_kv_BSC,
                                                          const SequenceContext& context) const {
  const bool own = source_ == KeySource::kOwnSequence;
  std::vector<AttentionInput> inputs(head_groups_.size());
  for (std::size_t g = 0; g < inputs.size(); ++g) {
    AttentionInput& in = inputs[g];
    in.q_BHLD = heads.q_BHTD[g];
    in.k_BHSD = heads.k_BHTD[g];
    in.v_BHSD = heads.v_BHTD[g];
    in.x_q_BLC = x_BTC;
    in.x_kv_BSC = x_kv_BSC;
    in.key_lengths_B = own ? context.lengths_B : context.memory.lengths_B;
    if (!own) continue;
    in.segments_q_BL = in.segments_kv_BS = context.segments_BT;
    in.num_documents = context.num_documents;
  }
  return inputs;
}

at::Tensor MultiHeadAttention::join(const std::vector<at::Tensor>& out_BHTD,
                                    const TokenSlices& tokens) const {
  std::vector<at::Tensor> out_BTC;
  for (const at::Tensor& out : out_BHTD) {
    out_BTC.push_back(out.transpose(1, 2).flatten(2));
  }
  const at::Tensor joined_BTC = out_BTC.size() == 1 ? out_BTC.front() : at::cat(out_BTC, -1);
  return output_ ? (*output_)(joined_BTC, tokens) : joined_BTC;
}

at::Tensor MultiHeadAttention::forward(const at::Tensor& x_BTC, const SequenceContext& context,
                                       const std::optional<NoiseKey>& noise,
                                       NamedSums& sums) const {
  std::vector<AttentionInput> inputs = project(x_BTC, context);
  std::vector<at::Tensor> queries_BHTD, out_BHTD;
  for (std::size_t g = 0; g < inputs.size(); ++g) {
    const HeadGroup& group = head_groups_[g];
    queries_BHTD.push_back(inputs[g].q_BHLD);
    if (query_scale_ != 1) inputs[g].q_BHLD = inputs[g].q_BHLD * query_scale_;
    if (noise) {
      NoiseKey key = noise->at_layer(noise_layer(noise_number_, RandomStream::kHeadGroup, g));
      key.first_head = group.first_head;
      key.all_heads = group.all_heads;
      inputs[g].noise = std::move(key);
    }
    if (ForwardRecord* record = ForwardRecord::current()) {
      record->attentions.push_back({group.name, group.mechanism.get(), inputs[g]});
    }
    const PathCaller caller(group.name);
    AttentionOutput output = group.mechanism->attend(inputs[g], Path::kFused);
    out_BHTD.push_back(output_ ? std::move(output.out_BHLD) : queries_BHTD[g] + output.out_BHLD);
    for (auto& [name, value] : output.sums) {
      sums.emplace_back(group.name + "." + name, std::move(value));
    }
  }
  return join(out_BHTD, context.tokens);
}

std::vector<std::unique_ptr<DecodeState>> MultiHeadAttention::decode_state(
    std::int64_t batch, const Memory& memory) const {
  std::vector<std::unique_ptr<DecodeState>> states;
  if (source_ == KeySource::kOwnSequence) {
    for (const HeadGroup& group : head_groups_) {
      states.push_back(group.mechanism->decode_state(batch));
    }
    return states;
  }
  const HeadProjections::Heads heads =
      projections_->keys_and_values(memory.x_BSC, memory.tokens).first;
  for (std::size_t g = 0; g < head_groups_.size(); ++g) {
    auto state = std::make_unique<MemoryState>();
    state->k_BHSD = heads.k_BHTD[g];
    state->v_BHSD = heads.v_BHTD[g];
    states.push_back(std::move(state));
  }
  return states;
}

at::Tensor MultiHeadAttention::decode_step(std::vector<std::unique_ptr<DecodeState>>& states,
                                           const at::Tensor& x_BTC,
                                           const SequenceContext& context) const {
  std::vector<at::Tensor> out_BHTD;
  if (source_ == KeySource::kOwnSequence) {
    const std::vector<AttentionInput> inputs = project(x_BTC, context);
    for (std::size_t g = 0; g < inputs.size(); ++g) {
      out_BHTD.push_back(head_groups_[g].mechanism->decode_step(*states[g], inputs[g]));
    }
    return join(out_BHTD, context.tokens);
  }
  auto [heads, x] = projections_->queries(x_BTC, context.tokens);
  for (const auto& each : states) {
    const auto& state = static_cast<const MemoryState&>(*each);
    heads.k_BHTD.push_back(state.k_BHSD);
    heads.v_BHTD.push_back(state.v_BHSD);
  }
  const std::vector<AttentionInput> inputs = inputs_of(heads, x, context.memory.x_BSC, context);
  for (std::size_t g = 0; g < inputs.size(); ++g) {
    out_BHTD.push_back(head_groups_[g].mechanism->attend(inputs[g], Path::kFused).out_BHLD);
  }
  return join(out_BHTD, context.tokens);
}

double MultiHeadAttention::forward_flops(std::int64_t num_queries, std::int64_t num_keys) const {
  const auto queries = static_cast<double>(num_queries), keys = static_cast<double>(num_keys);
  double flops =
      projections_->flops(num_queries, num_keys) + (output_ ? queries * output_->flops() : 0);
  for (const HeadGroup& group : head_groups_) {
    const Mechanism& mechanism = *group.mechanism;
    // With a memory, the cost is proportional to the pairs of a query and a key.
    const bool after_others = source_ == KeySource::kOwnSequence && num_keys > num_queries;
    const double of_group = after_others ? mechanism.forward_flops(num_keys) -
                                               mechanism.forward_flops(num_keys - num_queries)
                                         : mechanism.forward_flops(num_queries) * (keys / queries);
    flops += of_group * num_ranks_;
  }
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

bool MultiHeadAttention::balances_keys() const {
  return std::ranges::any_of(
      head_groups_, [](const HeadGroup& group) { return group.mechanism->traits().balances_keys; });
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
