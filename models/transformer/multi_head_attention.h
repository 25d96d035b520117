// The self-attention of one Transformer layer: projections, head groups with one mechanism each,
// output projection.
//
// Legend: B batch, T tokens, C channels, H heads of a group, D head dim, P position coordinates.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/mechanism.h"
#include "models/transformer/layers.h"

namespace birkhoff::configs {
class Attention;
class Model;
}  // namespace birkhoff::configs

namespace birkhoff {

// What every layer of a forward pass reads in addition to the residual stream.
struct SequenceContext {
  at::Tensor segments_BT;    // int32 document ids; undefined: one document
  at::Tensor positions_BTP;  // int64
  at::Tensor lengths_B;      // int64; tokens at t >= length are padding; undefined: none
};

class MultiHeadAttention {
 public:
  // `field` is the path of `attention` in the configuration, for messages; `layer` is the index of
  // the Transformer layer. Error(kConfig).
  MultiHeadAttention(const configs::Model& config, const configs::Attention& attention,
                     const std::string& field, std::int64_t layer, std::int64_t sequence_length,
                     bool causal, const std::string& name, Parameters& parameters,
                     const ParallelGroups& parallel);

  // x: [B, T, C], after the layer's norm. Appends the mechanisms' sums to `sums`, named
  // "<parameter prefix>.<name>".
  at::Tensor forward(const at::Tensor& x_BTC, const SequenceContext& context,
                     const std::optional<NoiseKey>& noise, NamedSums& sums) const;

  // Incremental decoding, with one state per head group. x: [B, 1, C], of the new token.
  std::vector<std::unique_ptr<DecodeState>> decode_state(std::int64_t batch) const;
  at::Tensor decode_step(std::vector<std::unique_ptr<DecodeState>>& states, const at::Tensor& x_BTC,
                         const SequenceContext& context) const;

  double forward_flops(std::int64_t num_tokens) const;
  std::vector<Figure> figures() const;
  std::vector<std::string> warnings() const;

 private:
  struct HeadGroup {
    std::string name;  // parameter prefix
    std::int64_t heads = 0;
    std::unique_ptr<Mechanism> mechanism;
    bool has_value = true;  // false: the keys are also the values
  };

  // One input for each head group.
  std::vector<AttentionInput> project(const at::Tensor& x_BTC,
                                      const SequenceContext& context) const;
  at::Tensor join(const std::vector<at::Tensor>& out_BHTD) const;

  std::int64_t layer_, head_dim_;
  std::vector<HeadGroup> head_groups_;
  // query_key_value_ outputs the queries of all groups, then their keys, then the values of the
  // groups that have values.
  std::optional<Linear> query_key_value_, output_;
};

}  // namespace birkhoff
