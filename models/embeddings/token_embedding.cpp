#include "models/embeddings/token_embedding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <string>
#include <utility>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/embeddings/vocabulary_parts.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {

TokenEmbedding::TokenEmbedding(const configs::Config& config, StackRole role,
                               std::int64_t vocabulary, Parameters& parameters,
                               const std::optional<ImageDims>& image, const TokenEmbedding* shared)
    : parameters_(parameters),
      units_{parameters.begin_unit()},
      role_(role),
      num_ids_(vocabulary),
      sequence_length_(longest_sequence(config, role)),
      scale_(config.model().scale_embeddings()
                 ? std::sqrt(static_cast<double>(config.model().channels()))
                 : 1.0),
      dropout_(config.model().dropout().embedding()),
      token_dropout_(config.model().dropout().token()) {
  require(vocabulary > 0, "a model of tokens needs a vocabulary");
  const ModelPlacement& place = parameters.place();
  if (vocabulary < place.tensor_size) {
    fail(ExitCode::kConfig,
         "mesh.tensor: {} ranks cannot divide a vocabulary of {} ids; set at most that many",
         place.tensor_size, vocabulary);
  }
  const configs::Model& model = config.model();
  const std::int64_t channels = model.channels();
  const std::string prefix = stack_prefix(role);
  const Initializer init = weight_init(model, WeightRole::kEmbedding, channels);
  const std::vector<VocabularyPart> parts = embedding_parts(model, vocabulary);
  require(parts.size() == 1 || (place.tensor_size == 1 && !image && shared == nullptr),
          "adaptive softmax is for language models on one rank of the tensor axis");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [ids, width] = parts[i];
    const std::string name = prefix + "embedding" + tail_name(i);
    const Interval mine = partition(ids.size(), place.tensor_rank, place.tensor_size);
    Table table{.ids = {ids.begin + mine.begin, ids.begin + mine.end}, .weight_VE = {}, .up = {}};
    table.weight_VE = shared != nullptr
                          ? shared->tables_[i].weight_VE
                          : parameters.add(name + ".weight", {ids.size(), width}, init,
                                           /*decay=*/true, {.dim = 0});
    if (width != channels) {
      table.up.emplace(model, WeightRole::kInner, width, channels, name + ".up", parameters);
    }
    tables_.push_back(std::move(table));
  }
  if (shared != nullptr) units_.push_back(shared->unit());
  if (image) {
    begin_E = parameters.add(prefix + "embedding.begin", {parts[0].width}, init, /*decay=*/false);
  }
  positions_.emplace(model, sequence_length_, prefix, image, parameters);
}

TokenSlices TokenEmbedding::slices(const Batch& batch) const {
  return token_slices(batch, parameters_);
}

at::Tensor TokenEmbedding::rows_of(const Table& table, const at::Tensor& tokens_BT) const {
  const bool has_begin = begin_E.defined();  // its row does not matter
  if (table.ids.size() == num_ids_) {
    return at::embedding(table.weight_VE, has_begin ? tokens_BT.clamp_min(0) : tokens_BT);
  }
  // Without this check an id outside the tables would be found in none.
  require(!tokens_BT.is_cpu() || tokens_BT.numel() == 0 ||
              (tokens_BT.min().item<std::int64_t>() >= (has_begin ? kBeginToken : 0) &&
               tokens_BT.max().item<std::int64_t>() < num_ids_),
          "a token's id is below the size of the vocabulary");
  const at::Tensor row_BT = tokens_BT - table.ids.begin;
  const at::Tensor elsewhere_BT1 =
      row_BT.lt(0).logical_or(row_BT.ge(table.ids.size())).unsqueeze(-1);
  return at::embedding(table.weight_VE, row_BT.clamp(0, table.ids.size() - 1))
      .masked_fill(elsewhere_BT1, 0);
}

at::Tensor TokenEmbedding::raised(const Table& table, const at::Tensor& x_BTE) const {
  return table.up ? (*table.up)(x_BTE).to(parameters_.dtype()) : x_BTE;
}

at::Tensor TokenEmbedding::embed(const at::Tensor& tokens_BT, const at::Tensor& positions_BT,
                                 const TokenSlices& tokens,
                                 const std::optional<NoiseKey>& noise) const {
  at::Tensor x_BTC = tokens.sum(rows_of(tables_[0], tokens_BT));
  if (begin_E.defined()) {
    const at::Tensor is_begin_BT1 = tokens.mine(tokens_BT).eq(kBeginToken).unsqueeze(-1);
    x_BTC = at::where(is_begin_BT1, begin_E, x_BTC);
  }
  x_BTC = raised(tables_[0], x_BTC);
  for (std::size_t i = 1; i < tables_.size(); ++i) {
    x_BTC = at::where(tokens_BT.ge(tables_[i].ids.begin).unsqueeze(-1),
                      raised(tables_[i], rows_of(tables_[i], tokens_BT)), x_BTC);
  }
  if (scale_ != 1) x_BTC = x_BTC * scale_;
  if (noise) x_BTC = tokens.drop_tokens(x_BTC, token_dropout_, *noise);
  return positions_->add_to(x_BTC, tokens_BT.size(0), tokens_BT.size(1), positions_BT, tokens);
}

double TokenEmbedding::flops() const {
  double flops = 0;
  for (const Table& table : tables_) {
    if (table.up) flops += table.up->flops();
  }
  return flops;
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
  std::optional<NoiseKey> key = noise;
  if (noise && role_ == StackRole::kSourceEncoder) {
    key = noise->at_layer(
        noise_layer(noise_number(NoiseLayers::kSourceEncoder, 0), RandomStream::kAttention));
  }
  const ParameterUse use(parameters_, units_);
  const at::Tensor x_BTC = use.output(
      embed(tokens_BT, batch.has(field::kPositions) ? batch.at(field::kPositions) : at::Tensor(),
            tokens, key));
  return key ? tokens.drop(x_BTC, dropout_, *key, NoisePurpose::kEmbeddingDropout) : x_BTC;
}

TokenSlices token_slices(const Batch& batch, const Parameters& parameters) {
  const at::Tensor& tokens_BT = batch.at(field::kInputs);
  return TokenSlices(parameters.place(), tokens_BT.size(0), tokens_BT.size(1));
}

SequenceContext token_context(const Batch& batch, const TokenSlices& tokens) {
  SequenceContext context;
  context.tokens = tokens;
  if (batch.has(field::kSegments)) context.segments_BT = batch.at(field::kSegments);
  context.num_documents = batch.num_documents;
  if (batch.has(field::kLengths)) context.lengths_B = batch.at(field::kLengths);
  return context;
}

}  // namespace birkhoff
