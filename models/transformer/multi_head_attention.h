// Self-attention of one block: projections, head groups with a mechanism each, output projection.
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

// What every block of one forward pass sees beside the residual stream.
struct SequenceContext {
  at::Tensor segments_BT;    // int32 document ids; undefined: one document
  at::Tensor positions_BTP;  // int64
};

using NamedSums = std::vector<std::pair<std::string, at::Tensor>>;

class MultiHeadAttention {
 public:
  // `field` is the path of `attention` in the configuration, for errors: Error(kConfig).
  MultiHeadAttention(const configs::Model& config, const configs::Attention& attention,
                     const std::string& field, std::int64_t block, std::int64_t sequence_length,
                     const std::string& name, Parameters& parameters, const ParallelGroups& groups);

  // x: [B, T, C] after the block's norm. The mechanisms' sums are appended to `sums`, as
  // "<parameter prefix>.<name>".
  at::Tensor forward(const at::Tensor& x_BTC, const SequenceContext& context,
                     const std::optional<NoiseKey>& noise, NamedSums& sums) const;

  // Decoding: one state a head group; x is the new token's [B, 1, C].
  std::vector<std::unique_ptr<DecodeState>> decode_state(std::int64_t batch) const;
  at::Tensor decode_step(std::vector<std::unique_ptr<DecodeState>>& states, const at::Tensor& x_BTC,
                         const SequenceContext& context) const;

  double forward_flops(std::int64_t num_tokens) const;
  std::vector<std::string> warnings() const;

 private:
  struct HeadGroup {
    std::string name;  // parameter prefix
    std::int64_t heads = 0;
    std::unique_ptr<Mechanism> mechanism;
    bool has_value = true;  // false: values are the keys
  };

  // One input for each group.
  std::vector<AttentionInput> project(const at::Tensor& x_BTC,
                                      const SequenceContext& context) const;
  at::Tensor join(const std::vector<at::Tensor>& out_BHTD) const;

  std::int64_t block_, head_dim_;
  std::vector<HeadGroup> head_groups_;
  // Outputs: queries of all groups, then keys, then values of the groups that have them.
  std::optional<Linear> query_key_value_, output_;
};

}  // namespace birkhoff
