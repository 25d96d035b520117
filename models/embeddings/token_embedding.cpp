#include "models/embeddings/token_embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <string>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {

TokenEmbedding::TokenEmbedding(const configs::Config& config, StackRole role,
                               std::int64_t vocabulary, Parameters& parameters,
                               const std::optional<ImageDims>& image, const TokenEmbedding* shared)
    : parameters_(parameters),
      units_{parameters.begin_unit()},
      role_(role),
      num_ids_(vocabulary),
      vocabulary_(
          partition(vocabulary, parameters.place().tensor_rank, parameters.place().tensor_size)),
      sequence_length_(longest_sequence(config, role)),
      scale_(config.model().scale_embeddings()
                 ? std::sqrt(static_cast<double>(config.model().channels()))
                 : 1.0),
      dropout_(config.model().dropout().embedding()) {
  require(vocabulary > 0, "a model of tokens needs a vocabulary");
  if (vocabulary < parameters.place().tensor_size) {
    fail(ExitCode::kConfig,
         "mesh.tensor: {} ranks cannot divide a vocabulary of {} ids; set at most that many",
         parameters.place().tensor_size, vocabulary);
  }
  const configs::Model& model = config.model();
  const std::int64_t channels = model.channels(), width = embedding_width(model);
  const std::string prefix = stack_prefix(role);
  const Initializer init = weight_init(model, WeightRole::kEmbedding, channels);
  if (shared != nullptr) {
    weight_VE_ = shared->weight_VE_;
    units_.push_back(shared->unit());
  } else {
    weight_VE_ = parameters.add(prefix + "embedding.weight", {vocabulary, width}, init,
                                /*decay=*/true, {.dim = 0});
  }
  if (width != channels) {
    up_.emplace(model, WeightRole::kInner, width, channels, prefix + "embedding.up", parameters);
  }
  if (image) begin_E = parameters.add(prefix + "embedding.begin", {width}, init, /*decay=*/false);
  positions_.emplace(model, sequence_length_, prefix, image, parameters);
}

TokenSlices TokenEmbedding::slices(const Batch& batch) const {
  return token_slices(batch, parameters_);
}

at::Tensor TokenEmbedding::rows_of_part(const at::Tensor& tokens_BT) const {
  const bool has_begin = begin_E.defined();  // its row does not matter
  if (parameters_.place().tensor_size == 1) {
    return at::embedding(weight_VE_, has_begin ? tokens_BT.clamp_min(0) : tokens_BT);
  }
  // Without this check an id outside the table would be found on no rank.
  require(!tokens_BT.is_cpu() || tokens_BT.numel() == 0 ||
              (tokens_BT.min().item<std::int64_t>() >= (has_begin ? kBeginToken : 0) &&
               tokens_BT.max().item<std::int64_t>() < num_ids_),
          "a token's id is below the size of the vocabulary");
  const at::Tensor row_BT = tokens_BT - vocabulary_.begin;
  const at::Tensor elsewhere_BT1 =
      row_BT.lt(0).logical_or(row_BT.ge(vocabulary_.size())).unsqueeze(-1);
  return at::embedding(weight_VE_, row_BT.clamp(0, vocabulary_.size() - 1))
      .masked_fill(elsewhere_BT1, 0);
}

at::Tensor TokenEmbedding::embed(const at::Tensor& tokens_BT, const at::Tensor& positions_BT,
                                 const TokenSlices& tokens) const {
  at::Tensor x_BTC = tokens.sum(rows_of_part(tokens_BT));
  if (begin_E.defined()) {
    const at::Tensor is_begin_BT1 = tokens.mine(tokens_BT).eq(kBeginToken).unsqueeze(-1);
    x_BTC = at::where(is_begin_BT1, begin_E, x_BTC);
  }
  if (up_) x_BTC = (*up_)(x_BTC).to(parameters_.dtype());
  if (scale_ != 1) x_BTC = x_BTC * scale_;
  return positions_->add_to(x_BTC, tokens_BT.size(0), tokens_BT.size(1), positions_BT, tokens);
}

at::Tensor TokenEmbedding::operator()(const Batch& batch, const TokenSlices& tokens,
                                      const std::optional<NoiseKey>& noise) const {
  const at::Tensor& tokens_BT = batch.at(field::kInputs);
  if (tokens_BT.size(1) > sequence_length_) {
    fail(ExitCode::kData, "a sequence of {} tokens is longer than {} = {}", tokens_BT.size(1),
         role_ == StackRole::kTargetDecoder ? "task.translation.target_length"
                                            : "data.sequence_length",
         sequence_length_);
  }
  const ParameterUse use(parameters_, units_);
  const at::Tensor x_BTC = use.output(
      embed(tokens_BT, batch.has(field::kPositions) ? batch.at(field::kPositions) : at::Tensor(),
            tokens));
  if (!noise) return x_BTC;
  const NoiseKey key =
      role_ == StackRole::kSourceEncoder
          ? noise->at_layer(
                noise_layer(noise_number(NoiseLayers::kSourceEncoder, 0), RandomStream::kAttention))
          : *noise;
  return tokens.drop(x_BTC, dropout_, key, NoisePurpose::kEmbeddingDropout);
}

TokenSlices token_slices(const Batch& batch, const Parameters& parameters) {
  const at::Tensor& tokens_BT = batch.at(field::kInputs);
  return TokenSlices(parameters.place(), tokens_BT.size(0), tokens_BT.size(1));
}

SequenceContext token_context(const Batch& batch, const TokenSlices& tokens) {
  SequenceContext context;
  context.tokens = tokens;
  if (batch.has(field::kSegments)) context.segments_BT = batch.at(field::kSegments);
  if (batch.has(field::kLengths)) context.lengths_B = batch.at(field::kLengths);
  return context;
}

}  // namespace birkhoff
