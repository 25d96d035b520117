#include "models/output_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "configs/schema/config.pb.h"
#include "models/parallel/parallel_cross_entropy.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {

OutputLayer::OutputLayer(const configs::Model& config, std::int64_t vocabulary,
                         const TokenEmbedding& embedding, const Stack& stack,
                         Parameters& parameters)
    : parameters_(parameters), vocabulary_(vocabulary), units_{stack.last_unit()} {
  const std::int64_t channels = config.channels(), width = embedding_width(config);
  if (width != channels) {
    down_.emplace(config, WeightRole::kInner, channels, width, "output.down", parameters);
  }
  if (config.tie_embeddings()) {
    weight_VE = embedding.weight_VE();
    units_.push_back(embedding.unit());
  } else {
    weight_VE = parameters.add("output.weight", {vocabulary, width},
                               weight_init(config, WeightRole::kEmbedding, channels),
                               /*decay=*/true, {.dim = 0});
  }
}

at::Tensor OutputLayer::part_of_logits(const at::Tensor& x, const TokenSlices& tokens) const {
  const ParameterUse use(parameters_, units_);
  return use.output(
      tokens.gather_linear(down_ ? (*down_)(x) : x, weight_VE.to(parameters_.compute_dtype()), {})
          .y_BTO);
}

at::Tensor OutputLayer::logits(const at::Tensor& x_BTC, const TokenSlices& tokens) const {
  const at::Tensor logits_BTv = part_of_logits(x_BTC, tokens);
  ProcessGroup* const group = parameters_.place().tensor;
  return (group == nullptr ? logits_BTv : gather_logits(logits_BTv, vocabulary_, *group))
      .to(parameters_.dtype());
}

OutputLayer::Loss OutputLayer::loss_of(const at::Tensor& logits_BTv, const at::Tensor& targets_BT,
                                       const at::Tensor& mask_BT, double label_smoothing,
                                       bool with_correct) const {
  ProcessGroup* const group = parameters_.place().tensor;
  Loss loss;
  if (with_correct) {  // before the loss, which may overwrite the logits
    const at::Tensor likeliest_BT = group == nullptr
                                        ? logits_BTv.detach().argmax(-1)
                                        : parallel_likeliest_ids(logits_BTv, vocabulary_, *group);
    loss.correct_BT = likeliest_BT.eq(targets_BT);
  }
  loss.sums = group == nullptr
                  ? cross_entropy_sums(logits_BTv, targets_BT, mask_BT, label_smoothing)
                  : parallel_cross_entropy_sums(logits_BTv, targets_BT, mask_BT, vocabulary_,
                                                *group, label_smoothing);
  return loss;
}

OutputLayer::Loss OutputLayer::loss(const at::Tensor& x_BTC, const TokenSlices& tokens,
                                    const at::Tensor& targets_BT, const at::Tensor& mask_BT,
                                    double label_smoothing, bool with_correct) const {
  // 256 MiB in fp32 on a rank, and as much again for the log-softmax.
  constexpr std::int64_t kMaxLogits = std::int64_t{1} << 26;
  const int ranks = parameters_.place().tensor_size;
  const std::int64_t ids = (vocabulary_ + ranks - 1) / ranks, num_tokens = targets_BT.numel();
  if (c10::GradMode::is_enabled() || num_tokens * ids <= kMaxLogits) {
    return loss_of(part_of_logits(x_BTC, tokens), targets_BT, mask_BT, label_smoothing,
                   with_correct);
  }
  const at::Tensor x_1NC = tokens.gather(x_BTC).flatten(0, 1).unsqueeze(0);
  const at::Tensor targets_1N = targets_BT.reshape({1, num_tokens}),
                   mask_1N = mask_BT.reshape({1, num_tokens});
  const std::int64_t rows = std::max<std::int64_t>(1, kMaxLogits / ids);
  Loss total;
  std::vector<at::Tensor> correct_1n;
  for (std::int64_t begin = 0; begin < num_tokens; begin += rows) {
    const std::int64_t count = std::min(rows, num_tokens - begin);
    const Loss part = loss_of(part_of_logits(x_1NC.narrow(1, begin, count), {}),
                              targets_1N.narrow(1, begin, count), mask_1N.narrow(1, begin, count),
                              label_smoothing, with_correct);
    correct_1n.push_back(part.correct_BT);
    if (begin == 0) {
      total.sums = part.sums;
      continue;
    }
    total.sums.loss = total.sums.loss + part.sums.loss;
    total.sums.nats = total.sums.nats + part.sums.nats;
    total.sums.count = total.sums.count + part.sums.count;
  }
  if (with_correct) total.correct_BT = at::cat(correct_1n, 1).view(targets_BT.sizes());
  return total;
}

at::Tensor OutputLayer::decode_step(const TokenEmbedding& embedding, const Stack& stack,
                                    DecodeCache& cache, const at::Tensor& tokens_B) const {
  const c10::AutoGradMode no_gradients(false);
  const at::Tensor tokens_B1 = tokens_B.unsqueeze(1);
  const at::Tensor positions_B1 = at::full(tokens_B1.sizes(), cache.length(), tokens_B1.options());
  const TokenSlices slices(parameters_.place(), tokens_B.size(0), 1);
  const at::Tensor x =
      stack.decode_step(cache, embedding.embed(tokens_B1, positions_B1, slices), slices);
  return logits(x, slices).squeeze(1);
}

double OutputLayer::flops() const {
  return 2.0 * static_cast<double>(vocabulary_) * static_cast<double>(weight_VE.size(1)) +
         (down_ ? down_->flops() : 0);
}

}  // namespace birkhoff
