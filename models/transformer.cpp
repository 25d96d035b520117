#include "models/transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <utility>

#include "cluster/base/error.h"
#include "configs/config.pb.h"
#include "models/transformer/recompute.h"
#include "models/transformer/sinusoid.h"

namespace birkhoff {
namespace {

// Checks how fields fit together. The ranges of single fields are checked when the configuration is
// read.
void check(const configs::Model& model, StackRole role, std::int64_t vocabulary) {
  if (model.channels() % model.heads() != 0) {
    fail(ExitCode::kConfig, "model.heads: {} does not divide model.channels = {}", model.heads(),
         model.channels());
  }
  const bool reads = role == StackRole::kTargetDecoder;
  require(model.attention_size() > 0 && model.layers() <= kMostLayers &&
              (!reads || model.encoder().cross_attention_size() > 0),
          "the configuration is not resolved");
  require(vocabulary > 0, "a model of tokens needs a vocabulary");
}

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

struct Cache final : DecodeCache {
  void select_rows(const at::Tensor& rows_B) override {
    for (const TransformerLayer::State& layer : layers) {
      for (const auto* states : {&layer.attention, &layer.cross_attention}) {
        for (const auto& state : *states) state->select_rows(rows_B);
      }
    }
    for (at::Tensor* x : {&memory.x_BSC, &memory.positions_BSP, &memory.lengths_B}) {
      if (x->defined()) *x = x->index_select(0, rows_B);
    }
  }

  std::int64_t length = 0;  // tokens decoded so far
  std::vector<TransformerLayer::State> layers;
  Memory memory;
};

}  // namespace

Parameters make_parameters(const configs::Config& config, const ParallelGroups& parallel) {
  const auto [stored, computed] = dtypes(config.train());
  return Parameters(config.train().seed(), stored, computed, parallel.data.device());
}

Transformer::Transformer(const configs::Config& config, StackRole role, std::int64_t vocabulary,
                         Parameters& parameters, const ParallelGroups& parallel)
    : parameters_(parameters),
      role_(role),
      sequence_length_(config.data().sequence_length()),
      embedding_scale_(config.model().scale_embeddings()
                           ? std::sqrt(static_cast<double>(config.model().channels()))
                           : 1.0),
      embedding_dropout_(config.model().dropout().embedding()),
      recompute_(config.train().recompute()) {
  const configs::Model model = stack_model(config.model(), role);
  check(model, role, vocabulary);
  const std::int64_t channels = model.channels();
  const std::string prefix = stack_prefix(role);
  const std::int64_t width = embedding_width(model);
  const Initializer init = weight_init(model, WeightRole::kEmbedding, channels);
  embedding_ =
      parameters.add(prefix + "embedding.weight", {vocabulary, width}, init, /*decay=*/true);
  if (width != channels) {
    embedding_up_.emplace(model, WeightRole::kInner, width, channels, prefix + "embedding.up",
                          parameters);
  }
  switch (model.positions()) {
    case configs::Model::learned:
      positions_ = parameters.add(prefix + "positions.weight", {sequence_length_, channels}, init,
                                  /*decay=*/true);
      break;
    case configs::Model::sinusoidal:
      positions_ = sinusoid_table(sequence_length_, channels)
                       .to(at::TensorOptions(parameters.dtype()).device(parameters.device()));
      break;
    case configs::Model::no_positions:
      break;
  }
  layers_.reserve(static_cast<std::size_t>(model.layers()));
  for (std::int64_t i = 0; i < model.layers(); ++i) {
    layers_.emplace_back(model, role, i, sequence_length_, parameters, parallel);
  }
  final_norm_.emplace(model, prefix + "final_norm", parameters);
}

at::Tensor Transformer::embed(const at::Tensor& tokens_BT, const at::Tensor& positions_BT) const {
  at::Tensor x_BTC = at::embedding(embedding_, tokens_BT);
  if (embedding_up_) x_BTC = (*embedding_up_)(x_BTC).to(parameters_.dtype());
  if (embedding_scale_ != 1) x_BTC = x_BTC * embedding_scale_;
  if (!positions_.defined()) return x_BTC;
  return x_BTC + (positions_BT.defined() ? at::embedding(positions_, positions_BT)
                                         : positions_.narrow(0, 0, tokens_BT.size(1)));
}

at::Tensor Transformer::normed(const ResidualStream& stream) const {
  return (*final_norm_)(stream).normed_BTC;
}

SequenceContext Transformer::context_of(const Batch& batch) const {
  const at::Tensor& tokens_BT = batch.at(field::kInputs);
  SequenceContext context;
  if (batch.has(field::kSegments)) context.segments_BT = batch.at(field::kSegments);
  if (batch.has(field::kLengths)) context.lengths_B = batch.at(field::kLengths);
  context.positions_BTP =
      (batch.has(field::kPositions)
           ? batch.at(field::kPositions)
           : at::arange(tokens_BT.size(1), tokens_BT.options()).expand(tokens_BT.sizes()))
          .unsqueeze(-1);
  return context;
}

void Transformer::check_memory(const Memory& memory, std::int64_t batch) const {
  const bool reads = role_ == StackRole::kTargetDecoder;
  require(memory.x_BSC.defined() == reads && (!reads || memory.x_BSC.size(0) == batch),
          "a decoder of two stacks reads a memory of as many samples; other stacks read none");
}

at::Tensor Transformer::run_layers(const Batch& batch, const SequenceContext& context,
                                   const std::optional<NoiseKey>& noise, NamedSums& sums) const {
  const at::Tensor& tokens_BT = batch.at(field::kInputs);
  const std::int64_t num_tokens = tokens_BT.size(1);
  if (num_tokens > sequence_length_) {
    fail(ExitCode::kData, "a sequence of {} tokens is longer than data.sequence_length = {}",
         num_tokens, sequence_length_);
  }
  check_memory(context.memory, tokens_BT.size(0));
  at::Tensor x_BTC =
      embed(tokens_BT, batch.has(field::kPositions) ? batch.at(field::kPositions) : at::Tensor());
  if (noise) {
    const NoiseKey key =
        role_ == StackRole::kSourceEncoder
            ? noise->at_layer(noise_layer(noise_number(NoiseLayers::kSourceEncoder, 0),
                                          RandomStream::kAttention))
            : *noise;
    x_BTC = philox_dropout(x_BTC, embedding_dropout_, key, NoisePurpose::kEmbeddingDropout);
  }
  ResidualStream stream{x_BTC, {}};
  for (const TransformerLayer& layer : layers_) {
    stream = recompute_ ? forward_recomputed(layer, stream, context, noise, sums)
                        : layer.forward(stream, context, noise, sums);
  }
  return normed(stream);
}

at::Tensor Transformer::forward(const Batch& batch, const std::optional<NoiseKey>& noise,
                                NamedSums& sums, const Memory& memory) const {
  SequenceContext context = context_of(batch);
  context.memory = memory;
  return run_layers(batch, context, noise, sums).to(parameters_.compute_dtype());
}

Memory Transformer::encode(const Batch& batch, const std::optional<NoiseKey>& noise,
                           NamedSums& sums) const {
  require(role_ == StackRole::kSourceEncoder && !batch.has(field::kSegments),
          "a memory is of a source encoder and has one document a sample");
  const SequenceContext context = context_of(batch);
  return {.x_BSC = run_layers(batch, context, noise, sums).to(parameters_.dtype()),
          .positions_BSP = context.positions_BTP,
          .lengths_B = context.lengths_B};
}

ResidualStream Transformer::forward_recomputed(const TransformerLayer& layer,
                                               const ResidualStream& stream,
                                               const SequenceContext& context,
                                               const std::optional<NoiseKey>& noise,
                                               NamedSums& sums) const {
  // Off the GPU the addition is a separate pass anyway: adding first keeps one tensor, not two.
  ResidualStream input = stream;
  if (input.branch_BTC.defined() && !input.x_BTC.is_cuda()) {
    input = {input.x_BTC + input.branch_BTC, {}};
  }
  // The memory is an input, because it has gradients.
  SequenceContext kept = context;
  kept.memory.x_BSC = at::Tensor();
  // The outputs are the layer's stream, then its sums. A part returns only tensors, so the names of
  // the sums are passed through `names`.
  const auto names = std::make_shared<std::vector<std::string>>();
  const std::vector<at::Tensor> outputs = recomputed(
      [&layer, kept, noise, names](const std::vector<at::Tensor>& inputs) {
        SequenceContext layer_context = kept;
        layer_context.memory.x_BSC = inputs[2];
        NamedSums layer_sums;
        const ResidualStream output =
            layer.forward({inputs[0], inputs[1]}, layer_context, noise, layer_sums);
        std::vector<at::Tensor> all{output.x_BTC, output.branch_BTC};
        names->clear();
        for (auto& [name, value] : layer_sums) {
          names->push_back(std::move(name));
          all.push_back(std::move(value));
        }
        return all;
      },
      {input.x_BTC, input.branch_BTC, context.memory.x_BSC});
  for (std::size_t i = 0; i < names->size(); ++i) sums.emplace_back((*names)[i], outputs[i + 2]);
  return {outputs[0], outputs[1]};
}

std::unique_ptr<DecodeCache> Transformer::decode_cache(std::int64_t batch,
                                                       const Memory& memory) const {
  const c10::AutoGradMode no_gradients(false);
  check_memory(memory, batch);
  auto cache = std::make_unique<Cache>();
  cache->memory = memory;
  for (const TransformerLayer& layer : layers_) {
    cache->layers.push_back(layer.decode_state(batch, memory));
  }
  return cache;
}

at::Tensor Transformer::decode_step(DecodeCache& decode_cache, const at::Tensor& tokens_B) const {
  const c10::AutoGradMode no_gradients(false);
  auto& cache = dynamic_cast<Cache&>(decode_cache);
  require(cache.length < sequence_length_, "decode_step: the cache already holds max_tokens()");
  const at::Tensor tokens_BT = tokens_B.unsqueeze(1);
  const at::Tensor positions_BT = at::full(tokens_BT.sizes(), cache.length, tokens_BT.options());
  const SequenceContext context{.segments_BT = {},
                                .positions_BTP = positions_BT.unsqueeze(-1),
                                .lengths_B = {},
                                .memory = cache.memory};
  ResidualStream stream{embed(tokens_BT, positions_BT), {}};
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    stream = layers_[i].decode_step(cache.layers[i], stream, context);
  }
  ++cache.length;
  return normed(stream).to(parameters_.compute_dtype());
}

double Transformer::forward_flops() const {
  double flops = embedding_up_ ? static_cast<double>(sequence_length_) * embedding_up_->flops() : 0;
  for (const TransformerLayer& layer : layers_) flops += layer.forward_flops(sequence_length_);
  return flops;
}

std::vector<Figure> Transformer::figures() const {
  std::vector<Figure> result;
  for (const TransformerLayer& layer : layers_) {
    for (Figure& figure : layer.figures()) result.push_back(std::move(figure));
  }
  return result;
}

std::vector<std::string> Transformer::warnings() const {
  std::vector<std::string> result;
  for (const TransformerLayer& layer : layers_) {
    for (std::string& warning : layer.warnings()) result.push_back(std::move(warning));
  }
  return result;
}

}  // namespace birkhoff
