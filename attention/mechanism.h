// The interface between a Transformer layer and the attention of its heads.
//
// Legend: B batch, H heads of this group, L queries, S keys, D head dim, C channels, P position
// coordinates. The layer owns the projections and the output map
// (models/transformer/multi_head_attention.h). A mechanism gets q, k, v per head and the layer's
// inputs, and owns everything else: SortNets, tying of K and V, dropout on probabilities, decoding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/kernels/token_blocks/token_blocks.h"
#include "cluster/base/collectives/process_group.h"
#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/parameters.h"

namespace birkhoff::configs {
class Mechanism;
}

namespace birkhoff {

struct AttentionInput {
  at::Tensor q_BHLD, k_BHSD, v_BHSD;  // v is k itself if the mechanism ties them
  at::Tensor x_q_BLC, x_kv_BSC;       // the layer's inputs (after its norm), for SortNets
  // int64; keys at s >= length are padding. Undefined: all S are valid.
  at::Tensor key_lengths_B;
  // int32 document ids, never decreasing along a row; a query sees only keys of its own document.
  // Undefined: one document.
  at::Tensor segments_q_BL, segments_kv_BS;
  at::Tensor positions_q_BLP, positions_kv_BSP;  // int64 coordinates of each token
  // Absent in evaluation and decoding: no dropout, no Gumbel noise.
  std::optional<NoiseKey> noise;
};

struct AttentionOutput {
  // Rows without a visible key are 0; rows that see a NaN are NaN (attention/kernels/README.md).
  at::Tensor out_BHLD;
  // Named sums over the micro-batch, 0-dim. "auxiliary_loss" is differentiable and is added to the
  // loss. The others are statistics; they reach the trainer, which does not report them yet.
  std::vector<std::pair<std::string, at::Tensor>> sums;
};

// Divides a self-attention input into blocks of `block` tokens. Error(kInternal) unless it has as
// many keys as queries.
Blocks token_blocks(const AttentionInput& in, std::int64_t block, bool causal);

// What a mechanism remembers of the past while it decodes one token after another.
class DecodeState {
 public:
  virtual ~DecodeState() = default;
};

struct MechanismProperties {
  // Outputs at t depend on inputs at <= t only.
  bool causal = false;
  // Configured as causal, but leaks the future (paper_masked). Reported at start and with every
  // figure.
  bool leaky = false;
  // decode_step returns the same outputs as forward.
  bool exact_in_decoding = false;
  // Keeps statistics that must be reduced over the data group.
  bool synchronised_statistics = false;
  // Values are the keys: the layer has no value projection for these heads.
  bool ties_key_value = false;
  // The reference holds the scores of all queries and keys at once.
  bool quadratic = false;
};

class Mechanism {
 public:
  virtual ~Mechanism() = default;

  // The specification: plain LibTorch operations and autograd, any device and floating dtype.
  virtual AttentionOutput reference(const AttentionInput& in) const = 0;
  // The fast path if device and shapes allow it, otherwise reference(). Same results up to
  // rounding.
  virtual AttentionOutput forward(const AttentionInput& in) const { return reference(in); }
  // The fastest path of LibTorch's own fused operations, without our kernels: their baseline. Same
  // results up to rounding.
  virtual AttentionOutput composed(const AttentionInput& in) const { return forward(in); }

  virtual MechanismProperties properties() const = 0;
  // bool [L, S]: the keys that a query may see in some input of these lengths (one document, no
  // padding), including the keys of sorted blocks.
  virtual at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const = 0;

  // Twice the multiply-adds of the forward pass of one sequence of `num_tokens` (self-attention,
  // one sample, all heads of the group).
  virtual double forward_flops(std::int64_t num_tokens) const = 0;

  // Decoding, for causal mechanisms. decode_state makes the state of `batch` sequences; each
  // decode_step then decodes one token. Its input has L = S = 1 (the new token's q, k, v, x, and
  // positions); it appends the token to the state. No gradients.
  virtual std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const;
  virtual at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const;
};

// What a mechanism is built for.
struct MechanismShape {
  std::int64_t channels = 0;         // C of x_q, x_kv
  std::int64_t heads = 0;            // H of this group
  std::int64_t head_dim = 0;         // D
  std::int64_t sequence_length = 0;  // longest L; determines the size of SortNets
  bool causal = false;
};

// Builds the mechanism that `config` names and adds its parameters to `parameters` under `prefix`.
// Error(kConfig) with the field's path if a value is outside the schema's range.
std::unique_ptr<Mechanism> make_mechanism(const configs::Mechanism& config,
                                          const MechanismShape& shape, const std::string& prefix,
                                          Parameters& parameters, const ParallelGroups& parallel);

}  // namespace birkhoff
