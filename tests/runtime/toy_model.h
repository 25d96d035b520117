// A small language model with every feature that the runtime relies on: several parameters of odd
// sizes, one that never gets a gradient, noise, a mechanism with a statistic, an auxiliary loss and
// figures, recomputation, and losses that can be made non-finite on demand.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>

#include "models/model.h"
#include "models/parallel/parameter_use.h"
#include "models/transformer/recompute.h"
#include "tests/runtime/running_mean.h"

namespace birkhoff::test {

inline constexpr std::int64_t kToyVocabulary = 11;
inline constexpr std::int64_t kToyTokens = 5;
inline constexpr std::int64_t kToyChannels = 7;

// Sample `id` of an endless data set: tokens that are partly predictable from the previous one.
inline Batch toy_batch(std::int64_t begin, std::int64_t end) {
  Batch batch;
  const auto ids_B = at::arange(begin, end, at::kLong);
  const auto places_T = at::arange(kToyTokens + 1, at::kLong);
  const auto tokens_BT =
      (ids_B.unsqueeze(1) * 5 + places_T * (ids_B.unsqueeze(1) % 3 + 1)).remainder(kToyVocabulary);
  batch.sample_ids_B = ids_B;
  batch.fields.emplace(field::kInputs, tokens_BT.narrow(1, 0, kToyTokens).contiguous());
  batch.fields.emplace(field::kTargets, tokens_BT.narrow(1, 1, kToyTokens).contiguous());
  // Not every token counts, and not the same number in every sample.
  batch.fields.emplace(
      field::kMask,
      ((ids_B.unsqueeze(1) + places_T.narrow(0, 0, kToyTokens)) % 4 != 0).to(at::kByte));
  return batch;
}

// The sum of this name.
inline at::Tensor sum_named(const std::string& name, const LossSums& sums) {
  for (const auto& [other, value] : sums.named) {
    if (other == name) return value;
  }
  throw std::out_of_range("no sum is named " + name);
}

class ToyModel : public Model {
 public:
  explicit ToyModel(at::ScalarType dtype, float dropout = 0.1f)
      : parameters_(3, dtype), dropout_(dropout) {
    units_.push_back(parameters_.begin_unit());
    embedding_VC_ = parameters_.add("embedding", {kToyVocabulary, kToyChannels},
                                    Initializer::normal(0.5), true);
    unused_ = parameters_.add("unused", {3}, Initializer::normal(1), true);
    units_.push_back(parameters_.begin_unit());
    hidden_CC_ = parameters_.add("hidden.weight", {kToyChannels, kToyChannels},
                                 Initializer::normal(0.4), true);
    hidden_bias_C_ = parameters_.add("hidden.bias", {kToyChannels}, Initializer::zeros(), false);
    output_VC_ =
        parameters_.add("output", {kToyVocabulary, kToyChannels}, Initializer::normal(0.4), true);
    mechanism_.emplace(
        MechanismShape{.channels = kToyChannels, .heads = 1, .head_dim = kToyChannels}, "attention",
        parameters_);
  }

  // Compute the mechanism's part of the network again in the backward pass.
  bool recompute = false;
  std::function<void()> before_pass;  // called before each forward pass of training

  // Makes the training losses of this step and this sample non-finite, or only the gradients.
  void spoil(std::int64_t step, std::int64_t sample) { spoilt_.insert({step, sample}); }
  void spoil_gradients(std::int64_t step, std::int64_t sample) {
    spoilt_gradients_.insert({step, sample});
  }

  Parameters& parameters() override { return parameters_; }

  LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) override {
    if (noise && before_pass) before_pass();
    NamedSums named;
    const auto scores_BTV = forward(batch, noise, named);
    const at::Tensor& targets_BT = batch.at(field::kTargets);
    const auto mask_BT = batch.at(field::kMask).to(scores_BTV.scalar_type());
    const auto nats_BT =
        -at::log_softmax(scores_BTV, -1).gather(-1, targets_BT.unsqueeze(-1)).squeeze(-1) * mask_BT;
    LossSums sums;
    sums.loss = nats_BT.sum();
    if (noise) {
      for (std::int64_t b = 0; b < batch.size(); ++b) {
        const std::pair key(noise->step.item<std::int64_t>(),
                            batch.sample_ids_B[b].item<std::int64_t>());
        if (spoilt_.count(key)) sums.loss = sums.loss * std::numeric_limits<double>::quiet_NaN();
        if (spoilt_gradients_.count(key)) sums.loss = sums.loss + (hidden_bias_C_ * 0).sqrt().sum();
      }
    }
    sums.nats = sums.loss.detach().to(at::kDouble);
    for (const auto& [name, value] : named) {
      const bool is_loss = name == "attention.auxiliary_loss";
      const at::Tensor sum = is_loss ? value.sum() : value;
      if (is_loss) sums.loss = sums.loss + sum;
      sums.named.emplace_back(name, sum.detach());
    }
    sums.count = mask_BT.detach().to(at::kDouble).sum();
    return sums;
  }

  at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise) {
    NamedSums named;
    return forward(batch, noise, named);
  }
  std::vector<Figure> figures() const override {
    std::vector<Figure> figures;
    for (const Figure& figure : mechanism_->traits().figures) {
      figures.push_back(with_prefix("attention.", figure));
    }
    return figures;
  }

  double forward_flops_per_sequence() const override { return 1; }
  std::vector<std::string> warnings() const override { return {}; }

 private:
  at::Tensor forward(const Batch& batch, const std::optional<NoiseKey>& noise,
                     NamedSums& named) const {
    const auto x_BTC = [&] {
      const ParameterUse use(parameters_, {units_[0]});
      return use.output(at::embedding(embedding_VC_, batch.at(field::kInputs)));
    }();
    const auto names = std::make_shared<std::vector<std::string>>();
    const auto part = [this, noise, names](const std::vector<at::Tensor>& inputs) {
      const ParameterUse use(parameters_, {units_[1]});
      auto hidden_BTC = at::tanh(at::matmul(inputs[0], hidden_CC_.t()) + hidden_bias_C_);
      if (noise && dropout_ > 0) {
        hidden_BTC = philox_dropout(hidden_BTC, dropout_, *noise, NoisePurpose::kActivationDropout);
      }
      AttentionInput in;
      in.q_BHLD = in.k_BHSD = in.v_BHSD = hidden_BTC.unsqueeze(1);
      in.noise = noise;
      AttentionOutput output = mechanism_->attend(in, Path::kFused);
      std::vector<at::Tensor> outputs{use.output(hidden_BTC + output.out_BHLD.squeeze(1))};
      names->clear();
      for (const auto& [name, value] : output.sums) {
        names->push_back("attention." + name);
        outputs.push_back(value);
      }
      return outputs;
    };
    const std::vector<at::Tensor> outputs = recompute ? recomputed(part, {x_BTC}) : part({x_BTC});
    for (std::size_t i = 0; i < names->size(); ++i) {
      named.emplace_back((*names)[i], outputs[i + 1]);
    }
    const ParameterUse use(parameters_, {units_[1]});
    return use.output(at::matmul(x_BTC + outputs[0], output_VC_.t()));
  }

  Parameters parameters_;
  std::vector<int> units_;
  at::Tensor embedding_VC_, unused_, hidden_CC_, hidden_bias_C_, output_VC_;
  std::optional<RunningMean> mechanism_;
  float dropout_;
  std::set<std::pair<std::int64_t, std::int64_t>> spoilt_, spoilt_gradients_;
};

}  // namespace birkhoff::test
