#include "models/embeddings/token_embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

at::Tensor sinusoid_table(std::int64_t positions, std::int64_t channels) {
  at::Tensor table_TC = at::zeros({positions, channels}, at::kDouble);
  auto table = table_TC.accessor<double, 2>();
  const std::int64_t half = channels / 2;
  const double step = std::log(1e4) / static_cast<double>(std::max<std::int64_t>(half - 1, 1));
  for (std::int64_t t = 0; t < positions; ++t) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(t) * std::exp(-step * static_cast<double>(i));
      table[t][i] = std::sin(angle);
      table[t][half + i] = std::cos(angle);
    }
  }
  return table_TC;
}

TokenEmbedding::TokenEmbedding(const configs::Config& config, StackRole role,
                               std::int64_t vocabulary, Parameters& parameters)
    : parameters_(parameters),
      role_(role),
      sequence_length_(config.data().sequence_length()),
      scale_(config.model().scale_embeddings()
                 ? std::sqrt(static_cast<double>(config.model().channels()))
                 : 1.0),
      dropout_(config.model().dropout().embedding()) {
  require(vocabulary > 0, "a model of tokens needs a vocabulary");
  const configs::Model& model = config.model();
  const std::int64_t channels = model.channels(), width = embedding_width(model);
  const std::string prefix = stack_prefix(role);
  const Initializer init = weight_init(model, WeightRole::kEmbedding, channels);
  weight_VE_ =
      parameters.add(prefix + "embedding.weight", {vocabulary, width}, init, /*decay=*/true);
  if (width != channels) {
    up_.emplace(model, WeightRole::kInner, width, channels, prefix + "embedding.up", parameters);
  }
  switch (model.positions()) {
    case configs::Model::learned:
      positions_TC_ = parameters.add(prefix + "positions.weight", {sequence_length_, channels},
                                     init, /*decay=*/true);
      break;
    case configs::Model::sinusoidal:
      positions_TC_ = sinusoid_table(sequence_length_, channels)
                          .to(at::TensorOptions(parameters.dtype()).device(parameters.device()));
      break;
    case configs::Model::no_positions:
      break;
  }
}

at::Tensor TokenEmbedding::embed(const at::Tensor& tokens_BT,
                                 const at::Tensor& positions_BT) const {
  at::Tensor x_BTC = at::embedding(weight_VE_, tokens_BT);
  if (up_) x_BTC = (*up_)(x_BTC).to(parameters_.dtype());
  if (scale_ != 1) x_BTC = x_BTC * scale_;
  if (!positions_TC_.defined()) return x_BTC;
  return x_BTC + (positions_BT.defined() ? at::embedding(positions_TC_, positions_BT)
                                         : positions_TC_.narrow(0, 0, tokens_BT.size(1)));
}

at::Tensor TokenEmbedding::operator()(const Batch& batch,
                                      const std::optional<NoiseKey>& noise) const {
  const at::Tensor& tokens_BT = batch.at(field::kInputs);
  if (tokens_BT.size(1) > sequence_length_) {
    fail(ExitCode::kData, "a sequence of {} tokens is longer than data.sequence_length = {}",
         tokens_BT.size(1), sequence_length_);
  }
  const at::Tensor x_BTC =
      embed(tokens_BT, batch.has(field::kPositions) ? batch.at(field::kPositions) : at::Tensor());
  if (!noise) return x_BTC;
  const NoiseKey key =
      role_ == StackRole::kSourceEncoder
          ? noise->at_layer(
                noise_layer(noise_number(NoiseLayers::kSourceEncoder, 0), RandomStream::kAttention))
          : *noise;
  return philox_dropout(x_BTC, dropout_, key, NoisePurpose::kEmbeddingDropout);
}

SequenceContext token_context(const Batch& batch) {
  SequenceContext context;
  if (batch.has(field::kSegments)) context.segments_BT = batch.at(field::kSegments);
  if (batch.has(field::kLengths)) context.lengths_B = batch.at(field::kLengths);
  return context;
}

}  // namespace birkhoff
