#include "models/transformer/transformer_layer.h"

#include <algorithm>
#include <utility>

#include "configs/loader/check.h"
#include "configs/schema/config.pb.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {
namespace {

std::string layer_name(StackRole role, std::int64_t number) {
  return stack_prefix(role) + "blocks." + std::to_string(number);
}

AttentionSublayer make_attention(const configs::Model& config, StackRole role, std::int64_t number,
                                 std::int64_t sequence_length, Parameters& parameters) {
  const int entry = static_cast<int>(number % config.attention_size());
  const bool causal = role == StackRole::kDecoder || role == StackRole::kTargetDecoder;
  const std::string name = layer_name(role, number) + ".attention";
  const std::int64_t noise = noise_number(
      role == StackRole::kSourceEncoder ? NoiseLayers::kSourceEncoder : NoiseLayers::kStack,
      number);
  return {
      LayerNorm(config, name + "_norm", parameters),
      MultiHeadAttention(config, config.attention(entry),
                         "model." + stack_prefix(role) + "attention." + std::to_string(entry),
                         KeySource::kOwnSequence, noise, sequence_length, causal, name, parameters),
      noise};
}

std::optional<AttentionSublayer> make_cross_attention(const configs::Model& config, StackRole role,
                                                      std::int64_t number,
                                                      std::int64_t memory_length,
                                                      Parameters& parameters) {
  if (role != StackRole::kTargetDecoder) return std::nullopt;
  const int entry = static_cast<int>(number % config.encoder().cross_attention_size());
  const std::string name = layer_name(role, number) + ".cross_attention";
  const std::int64_t noise = noise_number(NoiseLayers::kCrossAttention, number);
  return AttentionSublayer{
      LayerNorm(config, name + "_norm", parameters),
      MultiHeadAttention(config, config.encoder().cross_attention(entry),
                         "model.encoder.cross_attention." + std::to_string(entry),
                         KeySource::kMemory, noise, memory_length, /*causal=*/false, name,
                         parameters),
      noise};
}

}  // namespace

std::string stack_prefix(StackRole role) {
  return role == StackRole::kSourceEncoder ? "encoder." : "";
}

std::int64_t longest_sequence(const configs::Config& config, StackRole role) {
  if (role == StackRole::kTargetDecoder) return target_length(config);
  const int memory = std::max(config.model().memory().length(), evaluation_memory(config.model()));
  return std::int64_t{config.data().sequence_length()} + memory;
}

TransformerLayer::TransformerLayer(const configs::Model& config, StackRole role,
                                   std::int64_t number, std::int64_t sequence_length,
                                   std::int64_t memory_length, Parameters& parameters)
    : parameters_(parameters),
      unit_(parameters.begin_unit()),
      post_norm_(config.norm() == configs::Model::post),
      dropout_(config.dropout().residual()),
      attention_(make_attention(config, role, number, sequence_length, parameters)),
      cross_attention_(make_cross_attention(config, role, number, memory_length, parameters)) {
  if (config.attention_only()) return;
  feed_forward_norm_.emplace(config, layer_name(role, number) + ".feed_forward_norm", parameters);
  feed_forward_.emplace(config, layer_name(role, number) + ".feed_forward", parameters);
}

template <typename Sublayer>
ResidualStream TransformerLayer::after(const LayerNorm& norm, const ResidualStream& before,
                                       const Sublayer& f) const {
  if (post_norm_) return norm.next(before.x_BTC, f(before.x_BTC));
  const auto [x_BTC, normed_BTC] = norm(before);
  return {x_BTC, f(normed_BTC)};
}

ResidualStream TransformerLayer::forward(const ResidualStream& stream,
                                         const SequenceContext& context,
                                         const std::optional<NoiseKey>& noise,
                                         NamedSums& sums) const {
  const auto noise_of = [&](std::int64_t layer, RandomStream consumer) {
    return noise ? std::optional(noise->at_layer(noise_layer(layer, consumer))) : std::nullopt;
  };
  const auto dropout = [&](const at::Tensor& y, const std::optional<NoiseKey>& key) {
    return key ? context.tokens.drop(y, dropout_, *key, NoisePurpose::kResidualDropout) : y;
  };
  const ParameterUse use(parameters_, {unit_});
  SequenceContext normed = context;
  if (context.past_BMC.defined() && !post_norm_) {
    normed.past_BMC = attention_.norm({context.past_BMC, {}}).normed_BTC;
  }
  const auto attend = [&](const AttentionSublayer& sublayer, const ResidualStream& before) {
    return after(sublayer.norm, before, [&](const at::Tensor& x_BTC) {
      return dropout(sublayer.attention.forward(x_BTC, normed, noise, sums),
                     noise_of(sublayer.noise_number, RandomStream::kAttention));
    });
  };
  ResidualStream result = attend(attention_, stream);
  if (cross_attention_) result = attend(*cross_attention_, result);
  if (feed_forward_) {
    const std::optional<NoiseKey> key =
        noise_of(attention_.noise_number, RandomStream::kFeedForward);
    result = after(*feed_forward_norm_, result, [&](const at::Tensor& x_BTC) {
      return dropout((*feed_forward_)(x_BTC, context.tokens, key), key);
    });
  }
  // All gradients of the layer pass through the branch, because the norms before it need them; with
  // post-norm, through the last norm.
  at::Tensor& last_BTC = post_norm_ ? result.x_BTC : result.branch_BTC;
  last_BTC = use.output(last_BTC);
  return result;
}

TransformerLayer::State TransformerLayer::decode_state(std::int64_t batch,
                                                       const Memory& memory) const {
  State state{.attention = attention_.attention.decode_state(batch, memory), .cross_attention = {}};
  if (cross_attention_) {
    state.cross_attention = cross_attention_->attention.decode_state(batch, memory);
  }
  return state;
}

ResidualStream TransformerLayer::decode_step(State& state, const ResidualStream& stream,
                                             const SequenceContext& context) const {
  const auto attend = [&](const AttentionSublayer& sublayer,
                          std::vector<std::unique_ptr<DecodeState>>& states,
                          const ResidualStream& before) {
    return after(sublayer.norm, before, [&](const at::Tensor& x_BTC) {
      return sublayer.attention.decode_step(states, x_BTC, context);
    });
  };
  ResidualStream result = attend(attention_, state.attention, stream);
  if (cross_attention_) result = attend(*cross_attention_, state.cross_attention, result);
  if (!feed_forward_) return result;
  return after(*feed_forward_norm_, result, [&](const at::Tensor& x_BTC) {
    return (*feed_forward_)(x_BTC, context.tokens, std::nullopt);
  });
}

double TransformerLayer::forward_flops(std::int64_t num_tokens, std::int64_t memory_tokens,
                                       std::int64_t past_tokens) const {
  return attention_.attention.forward_flops(num_tokens, past_tokens + num_tokens) +
         (cross_attention_ ? cross_attention_->attention.forward_flops(num_tokens, memory_tokens)
                           : 0) +
         (feed_forward_ ? static_cast<double>(num_tokens) * feed_forward_->flops() : 0);
}

std::vector<const MultiHeadAttention*> TransformerLayer::attentions() const {
  std::vector<const MultiHeadAttention*> all{&attention_.attention};
  if (cross_attention_) all.push_back(&cross_attention_->attention);
  return all;
}

}  // namespace birkhoff
