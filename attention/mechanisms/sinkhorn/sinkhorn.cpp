// Legend: B batch, H heads, L tokens, N blocks, b tokens of a block, C channels, D head dim.
#include "attention/mechanisms/sinkhorn/sinkhorn.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>

#include "attention/kernels/sorted_blocks/sorted_blocks.h"
#include "attention/mechanisms/table.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

using Config = configs::SinkhornAttention;

constexpr double kBarred = -std::numeric_limits<double>::infinity();

Combine combine_of(Config::Combine combine) {
  switch (combine) {
    case Config::concat:
      return Combine::kConcat;
    case Config::add_outputs:
      return Combine::kAddOutputs;
    case Config::add_logits:
      return Combine::kAddLogits;
  }
  require(false, "unknown combine");
  return {};
}

}  // namespace

SinkhornAttention::SinkhornAttention(const Config& config, const MechanismShape& shape,
                                     const std::string& prefix, Parameters& parameters,
                                     const LogitTerms& terms)
    : config_(config), shape_(shape), terms_(terms) {
  const bool uniform = shape.causal && config.causal_balance() == Config::uniform;
  MechanismShape sorted = shape;  // keys are sorted
  sorted.heads = shape.heads_of_keys();
  if (!uniform) sort_net_.emplace(config, sorted, prefix + ".sort_net", parameters);
  if (leaky() && sort_net_->reads_sources()) {
    fail(ExitCode::kConfig,
         "sinkhorn.causal_balance is paper_masked and sort_net is attention (in {}): blocks would "
         "be scored by their own later tokens; use another sort_net",
         prefix);
  }
}

bool SinkhornAttention::leaky() const {
  return shape_.causal && config_.causal_balance() == Config::paper_masked;
}

bool SinkhornAttention::balances() const {
  return !shape_.causal ||
         (config_.causal_balance() != Config::none && config_.causal_balance() != Config::uniform);
}

bool SinkhornAttention::rows_sum_to_1() const {
  if (config_.top_m() > 0) return false;
  if (balances() && config_.iterations() == 0) return false;
  return !shape_.causal || (config_.causal_balance() != Config::none &&
                            config_.causal_balance() != Config::cumulative);
}

at::Tensor SinkhornAttention::visible_pairs(const at::Tensor& open_BNN) const {
  if (!shape_.causal) return open_BNN;
  return open_BNN.tril(leaky() ? 0 : -1);
}

BalancedWeights SinkhornAttention::weights(const at::Tensor& scores_BHNN,
                                           const at::Tensor& open_BNN, std::int64_t first_row,
                                           at::ScalarType dtype, Path limit) const {
  const std::int64_t num_rows = scores_BHNN.size(2) - first_row;
  const auto masked = [&](const at::Tensor& allowed_BNN) {
    return scores_BHNN.masked_fill(allowed_BNN.logical_not().unsqueeze(1), kBarred);
  };
  const auto last_rows = [&](const at::Tensor& x) { return x.narrow(2, first_row, num_rows); };
  const std::int64_t iterations = config_.iterations();
  const bool prefix = shape_.causal && config_.causal_balance() == Config::prefix;
  // A mask costs launches on a GPU. Where only the order of blocks matters, these balances need no
  // mask.
  if (!open_BNN.defined() && iterations > 0) {
    if (!shape_.causal) return balance_and_round(scores_BHNN, iterations, dtype, limit);
    if (prefix) return {prefix_balance(scores_BHNN, iterations, first_row, limit)};
  }
  const std::int64_t N = scores_BHNN.size(2);
  const at::Tensor visible_BNN = visible_pairs(
      open_BNN.defined() ? open_BNN : at::ones({1, N, N}, scores_BHNN.options().dtype(at::kBool)));
  if (balances() && iterations == 0) return {last_rows(masked(visible_BNN).exp())};
  if (!shape_.causal) return balance_and_round(masked(visible_BNN), iterations, dtype, limit);
  switch (config_.causal_balance()) {
    case Config::prefix: {
      // A destination without a visible source does not take part in any other row's balance
      // either.
      const at::Tensor taking_part = visible_BNN.any(2, /*keepdim=*/true);
      return {prefix_balance(masked(at::logical_and(open_BNN, taking_part)), iterations, first_row,
                             limit)};
    }
    case Config::cumulative:
      return {last_rows(cumulative_balance(masked(visible_BNN), iterations, limit))};
    case Config::none:
      return {last_rows(softmax_with_null(masked(visible_BNN)))};
    case Config::uniform: {
      const at::Tensor equal_BNN = visible_BNN.to(scores_BHNN.scalar_type());
      const at::Tensor mean_BNN = equal_BNN / equal_BNN.sum(2, /*keepdim=*/true).clamp_min(1);
      return {last_rows(mean_BNN.unsqueeze(1))};
    }
    case Config::paper_masked:
      return {last_rows(balance(masked(visible_BNN), iterations, limit))};
  }
  require(false, "unknown causal_balance");
  return {};
}

at::Tensor SinkhornAttention::largest_sources(const at::Tensor& weights_BHUN) const {
  if (config_.top_m() == 0 || config_.top_m() >= weights_BHUN.size(3)) return {};
  // A maximum is found faster than by a sort; both take the first of equal weights.
  if (config_.top_m() == 1) return weights_BHUN.detach().argmax(/*dim=*/3, /*keepdim=*/true);
  return at::argsort(weights_BHUN.detach(), /*stable=*/true, /*dim=*/3, /*descending=*/true)
      .narrow(3, 0, config_.top_m());
}

at::Tensor SinkhornAttention::keep(const at::Tensor& weights_BHUN, const at::Tensor& sources_BHUm) {
  if (!sources_BHUm.defined()) return weights_BHUN;
  const at::Tensor cut_BHUN =
      at::ones(weights_BHUN.sizes(), weights_BHUN.options().dtype(at::kBool))
          .scatter_(3, sources_BHUm, 0);
  return weights_BHUN.masked_fill(cut_BHUN, 0);
}

std::int64_t SinkhornAttention::first_tokens() const {
  return sort_net_ && config_.pooling() == Config::first ? config_.block() : 0;
}

BalancedWeights SinkhornAttention::block_weights(const Blocks& blocks, const at::Tensor& x_q_BLC,
                                                 const at::Tensor& first_BNC,
                                                 const at::Tensor& x_kv_BLC,
                                                 const at::Tensor& open_BNN,
                                                 const std::optional<NoiseKey>& noise,
                                                 at::ScalarType dtype, Path limit) const {
  const std::int64_t N = blocks.num_blocks();
  at::Tensor scores_BHNN;
  if (sort_net_) {
    const at::Tensor psi_BNC =
        pool_destinations(config_, shape_.causal, blocks, x_q_BLC, first_BNC, limit);
    const at::Tensor source_BNC =
        sort_net_->reads_sources() ? pool_sources(blocks, x_kv_BLC, limit) : at::Tensor();
    scores_BHNN = sort_net_->scores(psi_BNC, source_BNC, noise);
  } else {
    scores_BHNN = at::zeros({1, 1, N, N}, x_q_BLC.options());
  }
  return weights(scores_BHNN, open_BNN, /*first_row=*/0, dtype, limit);
}

std::vector<Choice> SinkhornAttention::choices(const AttentionInput& in) const {
  const at::NoGradGuard no_gradients;
  const Blocks blocks = token_blocks(in, config_.block(), shape_.causal);
  const at::Tensor weights_BHNN =
      block_weights(blocks, in.x_q_BLC, in.first_x_BNC, in.x_kv_BSC, open_pairs(blocks),
                    /*noise=*/{}, in.k_BHSD.scalar_type(), Path::kReference)
          .p;
  return {{.name = "sort matrix",
           .matrix_BHRC = keep(weights_BHNN, largest_sources(weights_BHNN)),
           .balanced = true}};
}

AttentionOutput SinkhornAttention::attend(const AttentionInput& in, Path limit) const {
  const Blocks blocks = token_blocks(in, config_.block(), shape_.causal);
  const std::int64_t N = blocks.num_blocks();
  const at::Tensor open_BNN = open_pairs(blocks);
  const BalancedWeights balanced =
      block_weights(blocks, in.x_q_BLC, in.first_x_BNC, in.x_kv_BSC, open_BNN, in.noise,
                    in.k_BHSD.scalar_type(), limit);
  const at::Tensor& all_weights_BHNN = balanced.p;
  const at::Tensor sources_BHNm = largest_sources(all_weights_BHNN);
  const at::Tensor weights_BHNN = keep(all_weights_BHNN, sources_BHNm);
  AttentionOutput output;
  if (config_.top_m() > 0) {
    const at::Tensor all =
        all_weights_BHNN.detach().expand({in.q_BHLD.size(0), shape_.heads_of_keys(), N, N});
    output.sums = {{"block_weight", all.sum(at::kDouble)},
                   {"block_weight_dropped", (all - weights_BHNN.detach()).sum(at::kDouble)}};
  }

  BlockAttention attention = sorted_and_own_attention(
      blocks,
      {.weights_BHNN = weights_BHNN,
       .rounded = sources_BHNm.defined() ? at::Tensor() : balanced.rounded,
       .sources_BHNm = sources_BHNm,
       .visible_BNN = open_BNN.defined() ? visible_pairs(open_BNN) : at::Tensor(),
       .causal = shape_.causal,
       .leaky = leaky(),
       .combine = combine_of(config_.combine())},
      in.q_BHLD, in.k_BHSD, in.v_BHSD, limit);
  attention.dropout = config_.dropout();
  attention.noise = in.noise;
  attention.relative = terms_.relative(in.q_BHLD);
  attention.sink_H = terms_.sink(in.q_BHLD);
  output.out_BHLD = blocks.from_blocks(attend_in_blocks(attention, limit), 2);
  return output;
}

MechanismTraits SinkhornAttention::traits() const {
  std::vector<Figure> figures;
  if (config_.top_m() > 0)
    figures.push_back({.sum = "block_weight_dropped", .per = "block_weight"});
  return {
      .causal = shape_.causal && !leaky(),
      .leak = leaky() ? "paper_masked leaks: its block weights depend on later tokens, so "
                        "losses are too low and sampling differs from training; label every "
                        "result made with it as leaky"
                      : "",
      .exact_in_decoding = shape_.causal && !leaky(),
      .ties_key_value = config_.tie_key_value(),
      .convex = rows_sum_to_1() && config_.combine() != Config::add_outputs && terms_.is_convex(),
      // The first query of a block has one aligned logit, so its own key changes nothing.
      .selects = config_.top_m() > 0 || (shape_.causal && config_.combine() == Config::add_logits),
      .unbounded = balances() && config_.iterations() == 0,
      .discontinuous = config_.top_m() > 0,
      .takes_relative_positions = config_.combine() != Config::add_logits,
      .figures = std::move(figures)};
}

at::Tensor SinkhornAttention::visible_keys(std::int64_t num_queries, std::int64_t num_keys) const {
  const std::int64_t b = config_.block();
  const at::Tensor query_L1 = at::arange(num_queries).unsqueeze(1), key_S = at::arange(num_keys);
  const bool aligned = config_.combine() == Config::add_logits;
  if (!shape_.causal) {
    // Aligned logits reach only offsets that the query's own block has.
    const at::Tensor own_block_L1 = at::div(query_L1, b, "floor") * b;
    return aligned ? own_block_L1 + key_S % b < num_keys
                   : at::ones({num_queries, num_keys}, at::kBool);
  }
  const at::Tensor earlier_block = at::div(key_S, b, "floor") < at::div(query_L1, b, "floor");
  const at::Tensor own = at::logical_and(key_S <= query_L1, earlier_block.logical_not());
  // Aligned logits, and sorted keys that are masked token by token, reach offsets up to the
  // query's.
  if (leaky() || aligned) {
    return at::logical_or(own, at::logical_and(earlier_block, key_S % b <= query_L1 % b));
  }
  return at::logical_or(own, earlier_block);
}

double SinkhornAttention::weights_flops(std::int64_t num_blocks) const {
  const double N = static_cast<double>(num_blocks);
  double balance_pairs = 0;
  if (balances()) {
    const bool prefix = shape_.causal && config_.causal_balance() == Config::prefix;
    balance_pairs = prefix ? N * N * N / 3 : shape_.causal ? N * (N - 1) / 2 : N * N;
  }
  // A step of the balance touches each pair about five times; an iteration is two steps.
  const double balance = 10 * static_cast<double>(config_.iterations()) * balance_pairs;
  return (sort_net_ ? sort_net_->flops(num_blocks) : 0) +
         balance * static_cast<double>(shape_.heads_of_keys());
}

double SinkhornAttention::forward_flops(std::int64_t num_tokens) const {
  const double b = static_cast<double>(config_.block());
  const double N = std::ceil(static_cast<double>(num_tokens) / b), L = N * b;
  const double width = static_cast<double>(shape_.heads * shape_.head_dim),
               key_width = static_cast<double>(shape_.heads_of_keys() * shape_.head_dim);
  const bool causal = shape_.causal;
  const double own_pairs = L * (causal ? (b + 1) / 2 : b);
  const double sorted_pairs =
      config_.combine() == Config::add_logits ? 0 : (causal ? L - b : L) * b;
  const double mixed_pairs = causal ? N * (N - 1) / 2 : N * N;
  const double mixes = config_.tie_key_value() ? 1 : 2;
  return 4 * (own_pairs + sorted_pairs) * width + 2 * mixes * mixed_pairs * b * key_width +
         weights_flops(static_cast<std::int64_t>(N)) +
         L * static_cast<double>(shape_.heads) * terms_.forward_flops();
}

std::unique_ptr<Mechanism> make_sinkhorn(const MakeArguments& m) {
  return std::make_unique<SinkhornAttention>(m.config.sinkhorn(), m.shape, m.prefix, m.parameters,
                                             m.terms);
}

}  // namespace birkhoff
