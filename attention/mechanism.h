// The interface between a Transformer layer and the attention of its heads.
//
// Legend: B batch, H heads of this group (keys and values may have fewer heads than queries,
// MechanismShape::key_heads), L queries, S keys, D head dim, C channels.
// The layer owns the projections and the output map (models/transformer/multi_head_attention.h). A
// mechanism gets q, k, v per head and the layer's inputs, and owns everything else: SortNets, tying
// of K and V, dropout on probabilities, decoding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/kernels/common/path.h"
#include "attention/kernels/token_blocks/token_blocks.h"
#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/named_sums.h"
#include "cluster/base/tensors/parameters.h"

namespace birkhoff::configs {
class Mechanism;
}

namespace birkhoff {

struct AttentionInput {
  at::Tensor q_BHLD;
  at::Tensor k_BHSD;             // q itself if the mechanism shares queries and keys
  at::Tensor v_BHSD;             // k itself if the mechanism ties keys and values
  at::Tensor x_q_BLC, x_kv_BSC;  // the layer's inputs (after its norm), for SortNets
  // The first tokens of x_q that Mechanism::first_tokens() asks for, where x_q is x_kv. Undefined:
  // they are taken from x_q.
  at::Tensor first_x_BNC;
  // int64; keys at s >= length are padding. Undefined: all S are valid.
  at::Tensor key_lengths_B;
  // int32 document ids, never decreasing along a row; a query sees only keys of its own document.
  // Undefined: one document.
  at::Tensor segments_q_BL, segments_kv_BS;
  std::int64_t num_documents = 0;  // how many a row has at most; 0: not known
  // Absent in evaluation and decoding: no dropout, no Gumbel noise.
  std::optional<NoiseKey> noise;
};

struct AttentionOutput {
  // Rows without a visible key are 0; rows that see a NaN are NaN (attention/kernels/README.md).
  at::Tensor out_BHLD;
  // Sums over the micro-batch, fp32 or wider:
  // - the sums that traits().figures name, 0-dim, without gradient;
  // - if the input has noise, the sums of the mechanism's statistics (Parameters::add_statistic),
  //   named without prefix, without gradient;
  // - "auxiliary_loss" [B], differentiable: for each sample, the sum over its tokens. A model
  //   weighs the samples and adds them to its loss, which is a sum over counted targets
  //   (models/losses/loss_sums.h).
  NamedSums sums;
};

// Divides a self-attention input into blocks of `block` tokens. Error(kInternal) unless it has as
// many keys as queries.
Blocks token_blocks(const AttentionInput& in, std::int64_t block, bool causal);

// A matrix that a mechanism computes before its outputs, to show it to people.
struct Choice {
  std::string name;        // "sort matrix"
  at::Tensor matrix_BHRC;  // values in [0, 1]; B and H may be 1, H may be key heads
  bool balanced = false;   // meant to have rows and columns that sum to 1
};

// A mechanism's state of the past while it decodes one token after another.
class DecodeState {
 public:
  virtual ~DecodeState() = default;

  // Row i becomes a copy of row rows_B[i] (int64 of any length, on the state's device): beam search
  // continues some sequences twice and drops some.
  virtual void select_rows(const at::Tensor& rows_B) = 0;
};

struct MechanismTraits {
  // Outputs at t depend on inputs at <= t only.
  bool causal = false;
  // A warning that the mechanism is configured as causal although its outputs depend on later
  // inputs. Reported at start and with every figure. Empty: no leak.
  std::string leak{};
  // decode_step returns the same outputs as attend.
  bool exact_in_decoding = false;
  // Keys are the queries: the layer has no key projection for these heads, and they do not support
  // cross-attention.
  bool shares_query_key = false;
  // Values are the keys: the layer has no value projection for these heads.
  bool ties_key_value = false;
  // Supports cross-attention: queries and keys may come from two sequences of different lengths.
  // Each output then depends on its own query only, so queries may come one at a time.
  bool supports_cross_attention = false;
  // Supports attention between two sets: queries and keys may differ in number, without padding or
  // documents, and their order has no meaning. Outputs may depend on all queries.
  bool supports_sets = false;
  // Sums over queries of the weights of a key are balanced, too: a single query gives all keys the
  // same weight.
  bool balances_keys = false;
  // The next four tell tests what to expect.
  // An output is a weighted mean of the values that its query sees.
  bool convex = false;
  // A query may reach only some of its visible keys.
  bool selects = false;
  // A query may reach no key, although it has visible keys. Its output is then 0.
  bool skips_queries = false;
  // The mechanism's gradient is not exactly that of its output.
  bool approximate_gradient = false;
  // Weights grow without bound with the layer's input: large inputs overflow.
  bool unbounded = false;
  // Keys are chosen by scores. Where two scores are almost equal, rounding may choose the other
  // key: outputs jump.
  bool discontinuous = false;
  // Supports relative positions.
  bool takes_relative_positions = false;
  // Supports MechanismShape::distances. A causal input may then have more keys than queries: those
  // of tokens before them. Documents and padding need as many.
  bool takes_sinusoidal_distances = false;
  // Supports sinks.
  bool takes_sinks = true;
  // Which keys a query sees depends on query values. Query heads that share a key head choose
  // together.
  bool chooses_keys = false;
  // Queries see keys of their clusters, which depend on the tokens' values.
  bool clusters = false;
  // The reference holds the scores of all queries and keys at once.
  bool quadratic = false;
  // Metrics to report; attend() returns their sums.
  std::vector<Figure> figures{};
};

class Mechanism {
 public:
  virtual ~Mechanism() = default;

  // Computes on the fastest path up to `limit` that supports device, dtype and shapes. kReference
  // is the specification: plain LibTorch operations and autograd, any device and floating dtype.
  // All paths give the same results up to rounding.
  virtual AttentionOutput attend(const AttentionInput& in, Path limit) const = 0;

  // If attend() reads x_q only for the first of each `block` tokens: `block`, else 0. A layer may
  // then take these with first_of_blocks() (attention/kernels/block_pool/block_pool.h) before it
  // projects x: so their gradient costs no pass over x's.
  virtual std::int64_t first_tokens() const { return 0; }

  virtual MechanismTraits traits() const = 0;
  // bool [L, S]: true where the query sees the key in at least one input of these lengths (one
  // document, no padding). Keys of sorted blocks count.
  virtual at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const = 0;

  // What the weights of an input follow from besides queries and keys, such as sort matrices and
  // clusters. Without noise and gradients, on the reference path. None by default.
  virtual std::vector<Choice> choices(const AttentionInput& in) const;

  // Twice the multiply-adds of the forward pass of one sequence of `num_tokens` (self-attention,
  // one sample, all heads of the group).
  virtual double forward_flops(std::int64_t num_tokens) const = 0;

  // Decoding, for causal mechanisms. decode_state makes the state of `batch` sequences. Each
  // decode_step then takes one token (q, k, v and x with L = S = 1), appends it to the state and
  // returns its output. No gradients.
  virtual std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const;
  virtual at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const;
};

// Scores with terms of the sinusoids of distances (attention/sinusoidal_distances.h). In evaluation
// and decoding, larger distances than the clamp count as it, and a query sees only as many keys as
// the window has, its own included; 0: no limit.
struct SinusoidalOptions {
  std::int64_t evaluation_clamp = 0, evaluation_window = 0;
};

// The shape for which a mechanism is built.
struct MechanismShape {
  std::int64_t channels = 0;         // C of x_q, x_kv
  std::int64_t heads = 0;            // H of this group: query heads
  std::int64_t key_heads = 0;        // heads of keys and values; 0: `heads`
  std::int64_t head_dim = 0;         // D
  std::int64_t sequence_length = 0;  // longest L; determines the size of SortNets
  bool causal = false;
  std::optional<SinusoidalOptions> distances{};  // only of causal mechanisms

  std::int64_t heads_of_keys() const { return key_heads > 0 ? key_heads : heads; }
};

// Builds the mechanism that `config` names and adds its parameters to `parameters` under `prefix`.
// Error(kConfig) with the field's path if a value is outside the schema's range.
std::unique_ptr<Mechanism> make_mechanism(const configs::Mechanism& config,
                                          const MechanismShape& shape, const std::string& prefix,
                                          Parameters& parameters);

}  // namespace birkhoff
