#include "models/transformer/transformer_layer.h"

#include "configs/config.pb.h"

namespace birkhoff {
namespace {

std::string layer_name(std::int64_t number) { return "blocks." + std::to_string(number); }

MultiHeadAttention make_attention(const configs::Model& config, std::int64_t number,
                                  std::int64_t sequence_length, bool causal, Parameters& parameters,
                                  const ParallelGroups& parallel) {
  const int entry = static_cast<int>(number % config.attention_size());
  return MultiHeadAttention(config, config.attention(entry),
                            "model.attention." + std::to_string(entry), number, sequence_length,
                            causal, layer_name(number) + ".attention", parameters, parallel);
}

}  // namespace

TransformerLayer::TransformerLayer(const configs::Model& config, std::int64_t number,
                                   std::int64_t sequence_length, bool causal,
                                   Parameters& parameters, const ParallelGroups& parallel)
    : number_(number),
      dropout_(config.dropout().residual()),
      attention_norm_(config, layer_name(number) + ".attention_norm", parameters),
      attention_(make_attention(config, number, sequence_length, causal, parameters, parallel)),
      feed_forward_norm_(config, layer_name(number) + ".feed_forward_norm", parameters),
      feed_forward_(config, layer_name(number) + ".feed_forward", parameters) {}

ResidualStream TransformerLayer::forward(const ResidualStream& stream,
                                         const SequenceContext& context,
                                         const std::optional<NoiseKey>& noise,
                                         NamedSums& sums) const {
  std::optional<NoiseKey> attention_noise, feed_forward_noise;
  if (noise) {
    attention_noise = noise->at_layer(noise_layer(number_, RandomStream::kAttention));
    feed_forward_noise = noise->at_layer(noise_layer(number_, RandomStream::kFeedForward));
  }
  const auto dropout = [&](const at::Tensor& y, const std::optional<NoiseKey>& key) {
    return key ? philox_dropout(y, dropout_, *key, NoisePurpose::kResidualDropout) : y;
  };
  const auto [x_BTC, normed_x_BTC] = attention_norm_(stream);
  const auto [y_BTC, normed_y_BTC] = feed_forward_norm_(
      {x_BTC, dropout(attention_.forward(normed_x_BTC, context, noise, sums), attention_noise)});
  return {y_BTC, dropout(feed_forward_(normed_y_BTC, feed_forward_noise), feed_forward_noise)};
}

std::vector<std::unique_ptr<DecodeState>> TransformerLayer::decode_state(std::int64_t batch) const {
  return attention_.decode_state(batch);
}

ResidualStream TransformerLayer::decode_step(std::vector<std::unique_ptr<DecodeState>>& states,
                                             const ResidualStream& stream,
                                             const SequenceContext& context) const {
  const auto [x_BTC, normed_x_BTC] = attention_norm_(stream);
  const auto [y_BTC, normed_y_BTC] =
      feed_forward_norm_({x_BTC, attention_.decode_step(states, normed_x_BTC, context)});
  return {y_BTC, feed_forward_(normed_y_BTC, std::nullopt)};
}

double TransformerLayer::forward_flops(std::int64_t num_tokens) const {
  return attention_.forward_flops(num_tokens) +
         static_cast<double>(num_tokens) * feed_forward_.flops();
}

}  // namespace birkhoff
