// Legend: B batch, H heads, L tokens, N blocks, b tokens of a block, C channels, D head dim.
#include "attention/sinkhorn_attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <functional>
#include <limits>

#include "attention/block_mix.h"
#include "attention/masked_softmax.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

using configs::SinkhornAttention;

constexpr double kBarred = -std::numeric_limits<double>::infinity();
constexpr double kLeastShare = 1e-20;  // of a sorted key's weight on tokens that exist

// The sorted blocks that each block's queries attend to.
struct SortedKeys {
  at::Tensor k_BHNbD, v_BHNbD;
  at::Tensor queries_BHNb1;  // bool: queries that see their block's sorted keys at all
  at::Tensor legal_BHNbb;    // bool: queries that see each sorted key
  at::Tensor bias_BHN1b;     // log share of existing tokens; undefined: all exist
};

using Mix = std::function<std::vector<at::Tensor>(const at::Tensor& weights_BHNN,
                                                  const std::vector<at::Tensor>& x_BHNbD)>;

// Mixes with weights whose row u is empty where row_sees_BN is false. `aligned`: queries see sorted
// keys of offsets up to their own. v_BHNbD may be k_BHNbD itself; so are the mixes then.
SortedKeys sort_keys(const Blocks& blocks, const at::Tensor& weights_BHNN, const Mix& mix,
                     const at::Tensor& row_sees_BN, bool aligned, const at::Tensor& k_BHNbD,
                     const at::Tensor& v_BHNbD) {
  const bool tied = v_BHNbD.is_same(k_BHNbD);
  std::vector<at::Tensor> keys_BHNbD{k_BHNbD};
  if (!tied) keys_BHNbD.push_back(v_BHNbD);
  const std::vector<at::Tensor> mixes_BHNbD = mix(weights_BHNN, keys_BHNbD);
  SortedKeys sorted;
  sorted.k_BHNbD = mixes_BHNbD.front();
  sorted.v_BHNbD = mixes_BHNbD.back();

  const std::int64_t block = k_BHNbD.size(3);
  sorted.queries_BHNb1 = row_sees_BN.unsqueeze(1).unsqueeze(3).unsqueeze(4);
  if (blocks.segments_BNb().defined()) {
    const at::Tensor in_document_BNb =
        blocks.segments_BNb() == blocks.segments_BNb().narrow(2, 0, 1);
    sorted.queries_BHNb1 =
        at::logical_and(sorted.queries_BHNb1, in_document_BNb.unsqueeze(1).unsqueeze(4));
  }
  sorted.legal_BHNbb = sorted.queries_BHNb1.expand({-1, -1, -1, block, block});
  if (aligned) sorted.legal_BHNbb = sorted.legal_BHNbb.tril();

  if (blocks.valid_BNb().defined()) {
    const at::Tensor valid_B1Nb = blocks.valid_BNb().unsqueeze(1).to(weights_BHNN.scalar_type());
    const at::Tensor total_BHN1 = weights_BHNN.sum(3, /*keepdim=*/true);
    const at::Tensor share_BHNb =
        at::matmul(weights_BHNN, valid_B1Nb) / total_BHN1.masked_fill(total_BHN1 == 0, 1);
    const at::Tensor divisor_BHNb = share_BHNb.clamp_min(kLeastShare);
    const at::Tensor divisor = divisor_BHNb.unsqueeze(4).to(k_BHNbD.scalar_type());
    sorted.k_BHNbD = sorted.k_BHNbD / divisor;
    sorted.v_BHNbD = tied ? sorted.k_BHNbD : sorted.v_BHNbD / divisor;
    sorted.legal_BHNbb =
        at::logical_and(sorted.legal_BHNbb, (share_BHNb > kLeastShare).unsqueeze(3));
    sorted.bias_BHN1b = divisor_BHNb.log().unsqueeze(3).to(k_BHNbD.scalar_type());
  }
  return sorted;
}

}  // namespace

SinkhornMechanism::SinkhornMechanism(const SinkhornAttention& config, const MechanismShape& shape,
                                     const std::string& prefix, Parameters& parameters)
    : config_(config), shape_(shape) {
  const bool uniform = shape.causal && config.causal_balance() == SinkhornAttention::uniform;
  if (!uniform) sort_net_.emplace(config, shape, prefix + ".sort_net", parameters);
  if (leaky() && sort_net_->reads_sources()) {
    fail(ExitCode::kConfig,
         "sinkhorn.causal_balance is paper_masked and sort_net is attention (in {}): blocks would "
         "be scored by their own later tokens; use another sort_net",
         prefix);
  }
}

bool SinkhornMechanism::leaky() const {
  return shape_.causal && config_.causal_balance() == SinkhornAttention::paper_masked;
}

bool SinkhornMechanism::balances() const {
  return !shape_.causal || (config_.causal_balance() != SinkhornAttention::none &&
                            config_.causal_balance() != SinkhornAttention::uniform);
}

at::Tensor SinkhornMechanism::open_pairs(const Blocks& blocks) const {
  const std::int64_t N = blocks.num_blocks();
  at::Tensor open_BNN = at::ones({1, N, N}, blocks.mask_options());
  if (blocks.valid_BNb().defined()) {
    const at::Tensor exists_BN = blocks.valid_BNb().select(2, 0);  // padding comes last
    open_BNN =
        at::logical_and(open_BNN, at::logical_and(exists_BN.unsqueeze(2), exists_BN.unsqueeze(1)));
  }
  if (blocks.segments_BNb().defined()) {
    const at::Tensor& segments_BNb = blocks.segments_BNb();
    const at::Tensor first_BN1 = segments_BNb.narrow(2, 0, 1);
    at::Tensor same_BNb = segments_BNb == first_BN1;
    if (blocks.valid_BNb().defined()) {
      same_BNb = at::logical_or(same_BNb, blocks.valid_BNb().logical_not());
    }
    const at::Tensor whole_B1N = same_BNb.all(2).unsqueeze(1);
    open_BNN = at::logical_and(open_BNN,
                               at::logical_and(whole_B1N, first_BN1 == first_BN1.transpose(1, 2)));
  }
  return open_BNN;
}

at::Tensor SinkhornMechanism::visible_pairs(const at::Tensor& open_BNN) const {
  if (!shape_.causal) return open_BNN;
  return open_BNN.tril(leaky() ? 0 : -1);
}

at::Tensor SinkhornMechanism::weights(const at::Tensor& scores_BHNN, const at::Tensor& open_BNN,
                                      std::int64_t first_row, BalancePath path) const {
  const std::int64_t num_rows = scores_BHNN.size(2) - first_row;
  const auto barred = [&](const at::Tensor& allowed_BNN) {
    return scores_BHNN.masked_fill(allowed_BNN.logical_not().unsqueeze(1), kBarred);
  };
  const auto last_rows = [&](const at::Tensor& x) { return x.narrow(2, first_row, num_rows); };
  const at::Tensor visible_BNN = visible_pairs(open_BNN);
  const std::int64_t iterations = config_.iterations();
  if (balances() && iterations == 0) return last_rows(barred(visible_BNN).exp());
  if (!shape_.causal) return last_rows(balance(barred(visible_BNN), iterations, path));
  switch (config_.causal_balance()) {
    case SinkhornAttention::prefix: {
      // A destination without a source of its own takes no part in others' balance either.
      const at::Tensor taking_part = visible_BNN.any(2, /*keepdim=*/true);
      return prefix_balance(barred(at::logical_and(open_BNN, taking_part)), iterations, first_row,
                            path)
          .masked_fill(visible_BNN.narrow(1, first_row, num_rows).logical_not().unsqueeze(1), 0);
    }
    case SinkhornAttention::cumulative:
      return last_rows(cumulative_balance(barred(visible_BNN), iterations, path));
    case SinkhornAttention::none:
      return last_rows(softmax_with_null(barred(visible_BNN)));
    case SinkhornAttention::uniform: {
      const at::Tensor equal_BNN = visible_BNN.to(scores_BHNN.scalar_type());
      const at::Tensor mean_BNN = equal_BNN / equal_BNN.sum(2, /*keepdim=*/true).clamp_min(1);
      return last_rows(mean_BNN.unsqueeze(1));
    }
    case SinkhornAttention::paper_masked:
      return last_rows(balance(barred(visible_BNN), iterations, path));
  }
  require(false, "unknown causal_balance");
  return {};
}

at::Tensor SinkhornMechanism::keep_largest(const at::Tensor& weights_BHUN) const {
  const std::int64_t num_sources = weights_BHUN.size(3);
  if (config_.top_m() == 0 || config_.top_m() >= num_sources) return weights_BHUN;
  const at::Tensor order_BHUN =
      at::argsort(weights_BHUN.detach(), /*stable=*/true, /*dim=*/3, /*descending=*/true);
  const at::Tensor cut_BHUN =
      at::ones(weights_BHUN.sizes(), weights_BHUN.options().dtype(at::kBool))
          .scatter_(3, order_BHUN.narrow(3, 0, config_.top_m()), 0);
  return weights_BHUN.masked_fill(cut_BHUN, 0);
}

AttentionOutput SinkhornMechanism::run(const AttentionInput& in, BlockPath limit) const {
  const Blocks blocks(in, config_.block(), shape_.causal);
  at::Tensor k_BHNbD = blocks.fold(in.k_BHSD, 2);
  at::Tensor v_BHNbD = config_.tie_key_value() ? k_BHNbD : blocks.fold(in.v_BHSD, 2);
  const at::Tensor& valid_BNb = blocks.valid_BNb();
  if (valid_BNb.defined()) {
    const at::Tensor padding = valid_BNb.logical_not().unsqueeze(1).unsqueeze(4);
    k_BHNbD = k_BHNbD.masked_fill(padding, 0);
    v_BHNbD = config_.tie_key_value() ? k_BHNbD : v_BHNbD.masked_fill(padding, 0);
  }

  const std::int64_t N = blocks.num_blocks();
  at::Tensor scores_BHNN = at::zeros({1, 1, N, N}, in.x_q_BLC.options());
  if (sort_net_) {
    const at::Tensor psi_BNC = pool_destinations(config_, shape_.causal, blocks, in.x_q_BLC, limit);
    const at::Tensor source_BNC =
        sort_net_->reads_sources() ? pool_sources(blocks, in.x_kv_BSC, limit) : at::Tensor();
    scores_BHNN = sort_net_->scores(psi_BNC, source_BNC, in.noise);
  }
  const at::Tensor open_BNN = open_pairs(blocks);
  const at::Tensor all_weights_BHNN =
      weights(scores_BHNN, open_BNN, 0,
              limit == BlockPath::kFused ? BalancePath::kFused : BalancePath::kReference);
  const at::Tensor weights_BHNN = keep_largest(all_weights_BHNN);
  AttentionOutput output;
  if (config_.top_m() > 0) {
    const at::Tensor all =
        all_weights_BHNN.detach().expand({in.q_BHLD.size(0), shape_.heads, N, N});
    output.sums = {{"block_weight", all.sum()},
                   {"block_weight_dropped", (all - weights_BHNN.detach()).sum()}};
  }

  const auto mix = [&](const at::Tensor& w_BHNN, const std::vector<at::Tensor>& x_BHNbD) {
    if (limit == BlockPath::kFused) {
      return mix_lower_blocks(w_BHNN, x_BHNbD, !shape_.causal ? N - 1 : leaky() ? 0 : -1);
    }
    std::vector<at::Tensor> mixes_BHNbD;
    for (const at::Tensor& x : x_BHNbD) mixes_BHNbD.push_back(mix_blocks(w_BHNN, x));
    return mixes_BHNbD;
  };
  const SortedKeys sorted = sort_keys(blocks, weights_BHNN, mix, visible_pairs(open_BNN).any(2),
                                      leaky(), k_BHNbD, v_BHNbD);

  KeyBlocks sorted_keys{.k_BHNbD = sorted.k_BHNbD,
                        .v_BHNbD = sorted.v_BHNbD,
                        .legal_BHNbb = {sorted.legal_BHNbb},
                        .bias_BHNbb = sorted.bias_BHN1b};
  KeyBlocks own_keys{.k_BHNbD = k_BHNbD,
                     .v_BHNbD = v_BHNbD,
                     .causal = shape_.causal,
                     .legal_BHNbb = {blocks.legal(0)},
                     .bias_BHNbb = {}};
  if (config_.combine() == SinkhornAttention::add_logits) {
    sorted_keys.k_BHNbD = sorted.k_BHNbD + k_BHNbD;  // q (k_s + k) is the sum of both logits
    sorted_keys.causal = shape_.causal;
    sorted_keys.legal_BHNbb = {and_defined(sorted.legal_BHNbb, blocks.legal(0))};
    own_keys.legal_BHNbb = {and_defined(blocks.legal(0), sorted.queries_BHNb1.logical_not())};
  }
  const BlockAttention attention{.q_BHNbD = blocks.fold(in.q_BHLD, 2),
                                 .keys = {sorted_keys, own_keys},
                                 .one_softmax = config_.combine() != SinkhornAttention::add_outputs,
                                 .dropout = config_.dropout(),
                                 .noise = in.noise};
  output.out_BHLD = blocks.unfold(attend_in_blocks(attention, fastest_path(attention, limit)), 2);
  return output;
}

AttentionOutput SinkhornMechanism::reference(const AttentionInput& in) const {
  return run(in, BlockPath::kReference);
}

AttentionOutput SinkhornMechanism::forward(const AttentionInput& in) const {
  return run(in, BlockPath::kFused);
}

AttentionOutput SinkhornMechanism::composed(const AttentionInput& in) const {
  return run(in, BlockPath::kComposed);
}

MechanismProperties SinkhornMechanism::properties() const {
  return {.causal = shape_.causal && !leaky(),
          .leaky = leaky(),
          .exact_in_decoding = shape_.causal && !leaky(),
          .ties_key_value = config_.tie_key_value()};
}

at::Tensor SinkhornMechanism::visible_keys(std::int64_t num_queries, std::int64_t num_keys) const {
  const std::int64_t b = config_.block();
  const at::Tensor query_L1 = at::arange(num_queries).unsqueeze(1), key_S = at::arange(num_keys);
  const bool aligned = config_.combine() == SinkhornAttention::add_logits;
  if (!shape_.causal) {
    // Logits of aligned positions end where the query's own block does.
    const at::Tensor own_block_L1 = at::div(query_L1, b, "floor") * b;
    return aligned ? own_block_L1 + key_S % b < num_keys
                   : at::ones({num_queries, num_keys}, at::kBool);
  }
  const at::Tensor earlier_block = at::div(key_S, b, "floor") < at::div(query_L1, b, "floor");
  const at::Tensor own = at::logical_and(key_S <= query_L1, earlier_block.logical_not());
  // Logits of aligned positions, or sorted keys masked token by token, reach offsets up to the own.
  if (leaky() || aligned) {
    return at::logical_or(own, at::logical_and(earlier_block, key_S % b <= query_L1 % b));
  }
  return at::logical_or(own, earlier_block);
}

double SinkhornMechanism::forward_flops(std::int64_t num_tokens) const {
  const double b = static_cast<double>(config_.block());
  const double N = std::ceil(static_cast<double>(num_tokens) / b), L = N * b;
  const double width = static_cast<double>(shape_.heads * shape_.head_dim);
  const bool causal = shape_.causal;
  const double own_pairs = L * (causal ? (b + 1) / 2 : b);
  const double sorted_pairs =
      config_.combine() == SinkhornAttention::add_logits ? 0 : (causal ? L - b : L) * b;
  const double mixed_pairs = causal ? N * (N - 1) / 2 : N * N;
  const double mixes = config_.tie_key_value() ? 1 : 2;
  double balance_pairs = 0;
  if (balances()) {
    const bool prefix = causal && config_.causal_balance() == SinkhornAttention::prefix;
    balance_pairs = prefix ? N * N * N / 3 : mixed_pairs;
  }
  // A step of the balance touches each pair about five times; an iteration is two steps.
  const double balance = 10 * static_cast<double>(config_.iterations()) * balance_pairs;
  return 4 * (own_pairs + sorted_pairs) * width + 2 * mixes * mixed_pairs * b * width +
         (sort_net_ ? sort_net_->flops(static_cast<std::int64_t>(N)) : 0) +
         balance * static_cast<double>(shape_.heads);
}

}  // namespace birkhoff
