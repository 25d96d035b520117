#include "models/output_layer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/embeddings/vocabulary_parts.h"
#include "models/losses/linear_cross_entropy.h"
#include "models/parallel/parallel_cross_entropy.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {
namespace {

// The positions n where is_of_part [N]. A meta tensor has no values, so their share is estimated.
at::Tensor positions_of(const at::Tensor& is_of_part_N, double share) {
  if (!is_of_part_N.is_meta()) return at::nonzero(is_of_part_N).squeeze(1);
  const double expected = std::ceil(share * static_cast<double>(is_of_part_N.numel()));
  return at::empty({static_cast<std::int64_t>(expected)}, is_of_part_N.options().dtype(at::kLong));
}

}  // namespace

OutputLayer::OutputLayer(const configs::Model& config, std::int64_t vocabulary,
                         const TokenEmbedding& embedding, const Stack& stack,
                         Parameters& parameters)
    : parameters_(parameters), vocabulary_(vocabulary), units_{stack.last_unit()} {
  const std::int64_t channels = config.channels();
  const Initializer init = weight_init(config, WeightRole::kEmbedding, channels);
  const std::vector<VocabularyPart> parts = vocabulary_parts(config, vocabulary);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [ids, width] = parts[i];
    const std::string name = "output" + tail_name(i);
    Part part{.ids = ids, .weight_VE = {}, .down = {}, .up_CE = {}};
    if (width != channels) {
      if (config.adaptive_softmax().tie_projections()) {
        part.up_CE = embedding.tables().at(i).up->weight();
      } else {
        part.down.emplace(config, WeightRole::kInner, channels, width, name + ".down", parameters);
      }
    }
    part.weight_VE = config.tie_embeddings()
                         ? embedding.tables().at(i).weight_VE
                         : parameters.add(name + ".weight", {ids.size(), width}, init,
                                          /*decay=*/true, {.dim = 0});
    parts_.push_back(std::move(part));
  }
  if (is_adaptive()) {
    tails_KE = parameters.add("output.tail_logits.weight",
                              {static_cast<std::int64_t>(parts.size()) - 1, parts[0].width}, init,
                              /*decay=*/true);
  }
  if (config.tie_embeddings()) units_.push_back(embedding.unit());
}

at::Tensor OutputLayer::lowered(const Part& part, const at::Tensor& x) const {
  if (part.up_CE.defined()) return at::linear(rounded(x), rounded(part.up_CE).t());
  return part.down ? (*part.down)(x) : x;
}

at::Tensor OutputLayer::head_weight() const {
  const at::Tensor weight_VE = rounded(parts_[0].weight_VE);
  return is_adaptive() ? at::cat({weight_VE, rounded(tails_KE)}) : weight_VE;
}

at::Tensor OutputLayer::part_of_logits(const at::Tensor& x, const TokenSlices& tokens) const {
  const ParameterUse use(parameters_, units_);
  return use.output(
      tokens.gather_linear(lowered(parts_[0], x), head_weight(), {}, /*used_once=*/false).y_BTO);
}

at::Tensor OutputLayer::log_probabilities(const at::Tensor& x_BTC) const {
  const ParameterUse use(parameters_, units_);
  const auto log_softmax = [&](const Part& part, const at::Tensor& weight_VE) {
    return at::log_softmax(at::linear(rounded(lowered(part, x_BTC)), weight_VE), /*dim=*/-1,
                           parameters_.dtype());
  };
  const at::Tensor head = log_softmax(parts_[0], head_weight());
  const std::int64_t ids_of_head = parts_[0].ids.size();
  std::vector<at::Tensor> all{head.narrow(-1, 0, ids_of_head)};
  for (std::size_t i = 1; i < parts_.size(); ++i) {
    const auto of_tail = ids_of_head + static_cast<std::int64_t>(i) - 1;
    all.push_back(head.narrow(-1, of_tail, 1) +
                  log_softmax(parts_[i], rounded(parts_[i].weight_VE)));
  }
  return use.output(at::cat(all, -1));
}

at::Tensor OutputLayer::logits(const at::Tensor& x_BTC, const TokenSlices& tokens) const {
  if (is_adaptive()) return log_probabilities(x_BTC);
  const at::Tensor logits_BTv = part_of_logits(x_BTC, tokens);
  ProcessGroup* const group = parameters_.place().tensor;
  return (group == nullptr ? logits_BTv : gather_logits(logits_BTv, vocabulary_, *group))
      .to(parameters_.dtype());
}

OutputLayer::Loss OutputLayer::loss(const at::Tensor& x_BTC, const TokenSlices& tokens,
                                    const at::Tensor& targets_BT, const at::Tensor& mask_BT,
                                    double label_smoothing, bool with_correct) const {
  if (parameters_.place().tensor != nullptr) {
    return divided_loss(x_BTC, tokens, targets_BT, mask_BT, label_smoothing, with_correct);
  }
  const at::Tensor x_NC = x_BTC.flatten(0, 1), targets_N = targets_BT.reshape(-1).contiguous(),
                   mask_N = mask_BT.reshape(-1).contiguous();
  const ParameterUse use(parameters_, units_);
  Loss loss;
  if (is_adaptive()) {
    require(label_smoothing == 0 && !with_correct,
            "adaptive softmax has no label smoothing and no accuracy");
    loss.sums = adaptive_loss(x_NC, targets_N, mask_N);
  } else {
    const LinearCrossEntropy all =
        linear_cross_entropy(rounded(lowered(parts_[0], x_NC)), head_weight(), targets_N, mask_N,
                             label_smoothing, with_correct);
    loss.sums = all.sums;
    if (with_correct) loss.correct_BT = all.correct_N.view(targets_BT.sizes());
  }
  loss.sums.loss = use.output(loss.sums.loss);
  return loss;
}

// Minus the logarithm of a product is a sum: the head's loss, whose target may be a tail, and the
// losses of tails.
LossSums OutputLayer::adaptive_loss(const at::Tensor& x_NC, const at::Tensor& targets_N,
                                    const at::Tensor& mask_N) const {
  const std::int64_t ids_of_head = parts_[0].ids.size();
  at::Tensor in_head_N = targets_N;
  for (std::size_t i = 1; i < parts_.size(); ++i) {
    in_head_N =
        at::where(targets_N.ge(parts_[i].ids.begin),
                  at::full({}, ids_of_head + static_cast<std::int64_t>(i) - 1, targets_N.options()),
                  in_head_N);
  }
  LossSums sums = linear_cross_entropy(rounded(lowered(parts_[0], x_NC)), head_weight(), in_head_N,
                                       mask_N, /*label_smoothing=*/0, /*with_correct=*/false)
                      .sums;
  for (std::size_t i = 1; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    const at::Tensor position_n = positions_of(targets_N.ge(part.ids.begin)
                                                   .logical_and(targets_N.lt(part.ids.end))
                                                   .logical_and(mask_N.ne(0)),
                                               zipf_share(part.ids, vocabulary_));
    // Also without any token, so that all parameters get gradients.
    const at::Tensor targets_n = targets_N.index_select(0, position_n) - part.ids.begin;
    const LossSums of_tail =
        linear_cross_entropy(rounded(lowered(part, x_NC.index_select(0, position_n))),
                             rounded(part.weight_VE), targets_n,
                             at::ones_like(targets_n, at::TensorOptions(at::kByte)),
                             /*label_smoothing=*/0, /*with_correct=*/false)
            .sums;
    sums.loss = sums.loss + of_tail.loss;
    sums.nats = sums.nats + of_tail.nats;
    if (!c10::GradMode::is_enabled())
      sums.nats_N = sums.nats_N.index_add(0, position_n, of_tail.nats_N);
  }
  return sums;
}

OutputLayer::Loss OutputLayer::divided_loss(const at::Tensor& x_BTC, const TokenSlices& tokens,
                                            const at::Tensor& targets_BT, const at::Tensor& mask_BT,
                                            double label_smoothing, bool with_correct) const {
  constexpr std::int64_t kMaxLogits = std::int64_t{1} << 26;  // of a rank, without gradients
  ProcessGroup& group = *parameters_.place().tensor;
  const auto loss_of = [&](const at::Tensor& logits_BTv, const at::Tensor& targets,
                           const at::Tensor& mask) {
    Loss loss;
    if (with_correct) {  // before the loss, which may overwrite the logits
      loss.correct_BT = parallel_likeliest_ids(logits_BTv, vocabulary_, group).eq(targets);
    }
    loss.sums =
        parallel_cross_entropy_sums(logits_BTv, targets, mask, vocabulary_, group, label_smoothing);
    return loss;
  };
  const std::int64_t ids = (vocabulary_ + group.size() - 1) / group.size(),
                     num_tokens = targets_BT.numel();
  if (c10::GradMode::is_enabled() || num_tokens * ids <= kMaxLogits) {
    return loss_of(part_of_logits(x_BTC, tokens), targets_BT, mask_BT);
  }
  const at::Tensor x_1NC = tokens.gather(x_BTC).flatten(0, 1).unsqueeze(0);
  const at::Tensor targets_1N = targets_BT.reshape({1, num_tokens}),
                   mask_1N = mask_BT.reshape({1, num_tokens});
  const std::int64_t rows = std::max<std::int64_t>(1, kMaxLogits / ids);
  Loss total;
  std::vector<at::Tensor> correct_1n, nats_n;
  for (std::int64_t begin = 0; begin < num_tokens; begin += rows) {
    const std::int64_t count = std::min(rows, num_tokens - begin);
    const Loss part = loss_of(part_of_logits(x_1NC.narrow(1, begin, count), {}),
                              targets_1N.narrow(1, begin, count), mask_1N.narrow(1, begin, count));
    correct_1n.push_back(part.correct_BT);
    nats_n.push_back(part.sums.nats_N);
    if (begin == 0) {
      total.sums = part.sums;
      continue;
    }
    total.sums.loss = total.sums.loss + part.sums.loss;
    total.sums.nats = total.sums.nats + part.sums.nats;
    total.sums.count = total.sums.count + part.sums.count;
  }
  total.sums.nats_N = at::cat(nats_n);
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
  double flops = 0;
  for (const Part& part : parts_) {
    const auto channels = static_cast<double>(part.up_CE.defined() ? part.up_CE.size(0) : 0),
               width = static_cast<double>(part.weight_VE.size(1)),
               ids = static_cast<double>(part.ids.size());
    const double of_token = 2 * width * (ids + channels) + (part.down ? part.down->flops() : 0);
    flops += of_token * (part.ids.begin == 0 ? 1 : zipf_share(part.ids, vocabulary_));
  }
  return flops + (is_adaptive() ? 2.0 * static_cast<double>(tails_KE.numel()) : 0);
}

}  // namespace birkhoff
