// The self- or cross-attention of one Transformer layer: projections, head groups with one
// mechanism each, output projection.
//
// Legend: B batch, T tokens, S tokens of the memory, C channels, H heads of a group, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/mechanism.h"
#include "models/transformer/head_projections.h"
#include "models/transformer/layers.h"

namespace birkhoff::configs {
class Attention;
class Model;
}  // namespace birkhoff::configs

namespace birkhoff {

// The outputs of an encoder, which cross-attention reads.
struct Memory {
  at::Tensor x_BSC;      // in the parameters' dtype: all layers add to its gradient
  at::Tensor lengths_B;  // int64; tokens at s >= length are padding; undefined: none
  TokenSlices tokens{};  // if divided, x is a slice
};

// What every layer of a forward pass reads in addition to the residual stream.
struct SequenceContext {
  at::Tensor segments_BT;          // int32 document ids; undefined: one document
  std::int64_t num_documents = 0;  // of a sequence at most; 0: not known
  at::Tensor lengths_B;            // int64; tokens at t >= length are padding; undefined: none
  // The layer's inputs at the M tokens before the sequence (model.memory), for MultiHeadAttention
  // after the norm; undefined: none. Their keys and values come before those of the sequence.
  at::Tensor past_BMC{};
  Memory memory{};       // of a decoder with cross-attention
  TokenSlices tokens{};  // if divided, the residual stream is a slice
};

class MultiHeadAttention {
 public:
  // `field` is the path of `attention` in the configuration, for messages; `noise_number` is that
  // of the layer. With a memory `causal` is false. Error(kConfig).
  MultiHeadAttention(const configs::Model& config, const configs::Attention& attention,
                     const std::string& field, KeySource source, std::int64_t noise_number,
                     std::int64_t sequence_length, bool causal, const std::string& name,
                     Parameters& parameters);
  // Attention between sets (models/set_transformer/set_block.h): scores are q . k / sqrt(C), the
  // queries are added to the heads' outputs, and there is no output projection. On one rank of the
  // tensor axis.
  static MultiHeadAttention between_sets(const configs::Model& config,
                                         const configs::Attention& attention,
                                         const std::string& field, KeySource source,
                                         const InputWidths& inputs, std::int64_t noise_number,
                                         std::int64_t num_points, const std::string& name,
                                         Parameters& parameters);

  // x: [B, T, C] or a slice of it, as the output, after the layer's norm. Appends the mechanisms'
  // sums to `sums`, named "<parameter prefix>.<name>".
  at::Tensor forward(const at::Tensor& x_BTC, const SequenceContext& context,
                     const std::optional<NoiseKey>& noise, NamedSums& sums) const;

  // Incremental decoding, with one state per head group. x: [B, 1, C], of the new token. States of
  // cross-attention hold the keys and values of the memory, which are computed once; the memory
  // itself comes with each context, and is not a slice there.
  std::vector<std::unique_ptr<DecodeState>> decode_state(std::int64_t batch,
                                                         const Memory& memory) const;
  at::Tensor decode_step(std::vector<std::unique_ptr<DecodeState>>& states, const at::Tensor& x_BTC,
                         const SequenceContext& context) const;

  // On all ranks of the tensor axis together. With a memory: of `num_keys` tokens; between sets
  // only, or as many as queries. Otherwise the queries are the last of `num_keys` tokens.
  double forward_flops(std::int64_t num_queries, std::int64_t num_keys) const;
  std::vector<Figure> figures() const;
  std::vector<std::string> warnings() const;
  // Whether a head group does: MechanismTraits::balances_keys.
  bool balances_keys() const;

 private:
  // What differs between layers of a Transformer and attention between sets.
  struct Form {
    InputWidths inputs;
    bool between_sets = false;
  };
  MultiHeadAttention(const configs::Model& config, const configs::Attention& attention,
                     const std::string& field, KeySource source, const Form& form,
                     std::int64_t noise_number, std::int64_t sequence_length, bool causal,
                     const std::string& name, Parameters& parameters);

  struct HeadGroup {
    std::string name;  // parameter prefix
    std::unique_ptr<Mechanism> mechanism;
    std::int64_t first_head = 0, all_heads = 0;  // of the tensor axis
  };

  // One input for each head group.
  std::vector<AttentionInput> project(const at::Tensor& x_BTC,
                                      const SequenceContext& context) const;
  // x of the queries and of the keys, of all tokens.
  std::vector<AttentionInput> inputs_of(const HeadProjections::Heads& heads,
                                        const at::Tensor& x_BTC, const at::Tensor& x_kv_BSC,
                                        const SequenceContext& context) const;
  at::Tensor join(const std::vector<at::Tensor>& out_BHTD, const TokenSlices& tokens) const;

  // The factor of queries that makes a mechanism's scores, q . k / sqrt(D), those of the form.
  double query_scale_;
  KeySource source_;
  std::int64_t noise_number_;
  int num_ranks_;  // of the tensor axis
  std::vector<HeadGroup> head_groups_;
  std::optional<HeadProjections> projections_;
  std::optional<Linear> output_;  // none between sets
};

}  // namespace birkhoff
