#include "models/transformer/stack.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/parallel/parameter_use.h"
#include "models/transformer/forward_record.h"
#include "models/transformer/recompute.h"

namespace birkhoff {
namespace {

// The fields that describe one stack: an encoder's layers and attention take the place of the
// decoder's.
configs::Model stack_model(const configs::Model& model, StackRole role) {
  configs::Model stack = model;
  if (role != StackRole::kSourceEncoder) return stack;
  stack.set_layers(model.encoder().layers());
  *stack.mutable_attention() = model.encoder().attention();
  stack.clear_encoder();
  return stack;
}

// The dtype that parameters are stored and updated in, and the dtype that layers compute in.
std::pair<at::ScalarType, at::ScalarType> dtypes(const configs::Train& train) {
  switch (train.precision()) {
    case configs::Train::fp32:
      return {at::kFloat, at::kFloat};
    case configs::Train::fp64:
      return {at::kDouble, at::kDouble};
    case configs::Train::bf16:
      return {at::kFloat, at::kBFloat16};
    case configs::Train::fp16:
      return {at::kFloat, at::kHalf};
  }
  require(false, "train.precision has a value outside its enum");
  return {};
}

at::Tensor sum_of(const ResidualStream& stream) {
  return stream.branch_BTC.defined() ? stream.x_BTC + stream.branch_BTC : stream.x_BTC;
}

// The last tokens, at most `max_tokens`, of the tokens x after those of past, which may be
// undefined.
at::Tensor last_tokens(const at::Tensor& past_BMC, const at::Tensor& x_BTC,
                       std::int64_t max_tokens) {
  const std::int64_t before = past_BMC.defined() ? past_BMC.size(1) : 0,
                     kept = std::min(before, std::max<std::int64_t>(max_tokens - x_BTC.size(1), 0)),
                     own = std::min(x_BTC.size(1), max_tokens);
  const at::Tensor last_BTC = x_BTC.narrow(1, x_BTC.size(1) - own, own);
  return kept == 0 ? last_BTC : at::cat({past_BMC.narrow(1, before - kept, kept), last_BTC}, 1);
}

struct Cache final : DecodeCache {
  void select_rows(const at::Tensor& rows_B) override {
    for (const TransformerLayer::State& layer : layers) {
      for (const auto* states : {&layer.attention, &layer.cross_attention}) {
        for (const auto& state : *states) state->select_rows(rows_B);
      }
    }
    for (at::Tensor* x : {&memory.x_BSC, &memory.lengths_B}) {
      if (x->defined()) *x = x->index_select(0, rows_B);
    }
  }

  std::int64_t length() const override { return num_tokens; }

  std::int64_t num_tokens = 0;
  std::vector<TransformerLayer::State> layers;
  Memory memory;
};

}  // namespace

Parameters make_parameters(const configs::Config& config, const ModelPlacement& place) {
  const auto [stored, computed] = dtypes(config.train());
  return Parameters(config.train().seed(), stored, computed, place);
}

Stack::Stack(const configs::Config& config, StackRole role, Parameters& parameters)
    : parameters_(parameters), role_(role), recompute_(config.train().recompute()) {
  const configs::Model model = stack_model(config.model(), role);
  require(model.attention_size() > 0 && model.layers() <= kMaxLayers,
          "the configuration is not resolved");
  layers_.reserve(static_cast<std::size_t>(model.layers()));
  for (std::int64_t i = 0; i < model.layers(); ++i) {
    layers_.emplace_back(model, role, i, longest_sequence(config, role),
                         longest_sequence(config, StackRole::kSourceEncoder), parameters);
  }
  last_unit_ = parameters.begin_unit();
  if (model.norm() == configs::Model::post) return;
  final_norm_.emplace(model, stack_prefix(role) + "final_norm", parameters);
}

at::Tensor Stack::last_normed(const ResidualStream& stream) const {
  if (!final_norm_) return stream.x_BTC;
  const ParameterUse use(parameters_, {last_unit_});
  return use.output((*final_norm_)(stream).normed_BTC);
}

void Stack::check_memory(const Memory& memory, std::int64_t batch) const {
  const bool reads = role_ == StackRole::kTargetDecoder;
  // The size of a slice says nothing about the number of samples.
  require(memory.x_BSC.defined() == reads &&
              (!reads || memory.tokens.divided() || memory.x_BSC.size(0) == batch),
          "a decoder of two stacks reads a memory of as many samples; other stacks read none");
}

at::Tensor Stack::run_layers(const at::Tensor& x_BTC, const SequenceContext& context,
                             const std::optional<NoiseKey>& noise, NamedSums& sums,
                             Past* past) const {
  check_memory(context.memory, x_BTC.size(0));
  require(past == nullptr || !context.tokens.divided(), "earlier tokens are not divided");
  ResidualStream stream{x_BTC, {}};
  ForwardRecord* const record = ForwardRecord::current();
  if (record != nullptr) record->streams_BTC.push_back(x_BTC);
  SequenceContext of_layer = context;
  std::vector<at::Tensor> next_BMC;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    if (past != nullptr) {
      if (past->inputs_BNMC.defined()) {
        of_layer.past_BMC = past->inputs_BNMC.select(1, static_cast<std::int64_t>(i));
      }
      next_BMC.push_back(last_tokens(of_layer.past_BMC, sum_of(stream).detach(), past->max_tokens));
    }
    stream = recompute_ ? forward_recomputed(layers_[i], stream, of_layer, noise, sums)
                        : layers_[i].forward(stream, of_layer, noise, sums);
    if (record != nullptr) record->streams_BTC.push_back(sum_of(stream));
  }
  if (!next_BMC.empty()) past->next_BNMC = at::stack(next_BMC, 1);
  return last_normed(stream);
}

at::Tensor Stack::forward(const at::Tensor& x_BTC, const SequenceContext& context,
                          const std::optional<NoiseKey>& noise, NamedSums& sums, Past* past) const {
  return run_layers(x_BTC, context, noise, sums, past).to(parameters_.compute_dtype());
}

Memory Stack::encode(const at::Tensor& x_BSC, const SequenceContext& context,
                     const std::optional<NoiseKey>& noise, NamedSums& sums) const {
  require(role_ == StackRole::kSourceEncoder && !context.segments_BT.defined(),
          "a memory is of a source encoder and has one document a sample");
  return {.x_BSC = run_layers(x_BSC, context, noise, sums, nullptr).to(parameters_.dtype()),
          .lengths_B = context.lengths_B,
          .tokens = context.tokens};
}

ResidualStream Stack::forward_recomputed(const TransformerLayer& layer,
                                         const ResidualStream& stream,
                                         const SequenceContext& context,
                                         const std::optional<NoiseKey>& noise,
                                         NamedSums& sums) const {
  // Off the GPU the addition is a separate pass anyway: adding first keeps one tensor, not two.
  ResidualStream input = stream;
  if (!input.x_BTC.is_cuda()) input = {sum_of(input), {}};
  // The memory is an input, because it has gradients.
  SequenceContext kept = context;
  kept.memory.x_BSC = at::Tensor();
  // The outputs are the layer's x, its branch if it has one, then its sums. A part returns only
  // tensors, so the names of the sums are passed through `names`.
  const auto names = std::make_shared<std::vector<std::string>>();
  const std::vector<at::Tensor> outputs = recomputed(
      [&layer, kept, noise, names](const std::vector<at::Tensor>& inputs) {
        SequenceContext layer_context = kept;
        layer_context.memory.x_BSC = inputs[2];
        NamedSums layer_sums;
        const ResidualStream output =
            layer.forward({inputs[0], inputs[1]}, layer_context, noise, layer_sums);
        std::vector<at::Tensor> all{output.x_BTC};
        if (output.branch_BTC.defined()) all.push_back(output.branch_BTC);
        names->clear();
        for (auto& [name, value] : layer_sums) {
          names->push_back(std::move(name));
          all.push_back(std::move(value));
        }
        return all;
      },
      {input.x_BTC, input.branch_BTC, context.memory.x_BSC});
  const std::size_t first_sum = outputs.size() - names->size();
  for (std::size_t i = 0; i < names->size(); ++i) {
    sums.emplace_back((*names)[i], outputs[first_sum + i]);
  }
  return {outputs[0], first_sum > 1 ? outputs[1] : at::Tensor()};
}

std::unique_ptr<DecodeCache> Stack::decode_cache(std::int64_t batch, const Memory& memory) const {
  const c10::AutoGradMode no_gradients(false);
  check_memory(memory, batch);
  auto cache = std::make_unique<Cache>();
  cache->memory = {.x_BSC = memory.tokens.gather(memory.x_BSC), .lengths_B = memory.lengths_B};
  for (const TransformerLayer& layer : layers_) {
    cache->layers.push_back(layer.decode_state(batch, memory));
  }
  return cache;
}

at::Tensor Stack::decode_step(DecodeCache& decode_cache, const at::Tensor& x_BTC,
                              const TokenSlices& tokens) const {
  const c10::AutoGradMode no_gradients(false);
  auto& cache = dynamic_cast<Cache&>(decode_cache);
  const SequenceContext context{
      .segments_BT = {}, .lengths_B = {}, .memory = cache.memory, .tokens = tokens};
  ResidualStream stream{x_BTC, {}};
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    stream = layers_[i].decode_step(cache.layers[i], stream, context);
  }
  ++cache.num_tokens;
  return last_normed(stream).to(parameters_.compute_dtype());
}

double Stack::forward_flops(std::int64_t num_tokens, std::int64_t memory_tokens,
                            std::int64_t past_tokens) const {
  double flops = 0;
  for (const TransformerLayer& layer : layers_) {
    flops += layer.forward_flops(num_tokens, memory_tokens, past_tokens);
  }
  return flops;
}

std::vector<Figure> Stack::figures() const {
  std::vector<Figure> result;
  for (const TransformerLayer& layer : layers_) {
    for (const MultiHeadAttention* attention : layer.attentions()) {
      for (Figure& figure : attention->figures()) result.push_back(std::move(figure));
    }
  }
  return result;
}

std::vector<std::string> Stack::warnings() const {
  std::vector<std::string> result;
  for (const TransformerLayer& layer : layers_) {
    for (const MultiHeadAttention* attention : layer.attentions()) {
      for (std::string& warning : attention->warnings()) result.push_back(std::move(warning));
    }
  }
  return result;
}

}  // namespace birkhoff
