// Routing attention of one token after another. Legend: B batch, H heads, L tokens, S tokens so
// far, D head dim, K clusters, W tokens of a cluster's window.
#include <ATen/ATen.h>

#include <limits>

#include "attention/kernels/clusters/dense_mass.h"
#include "attention/key_value_cache.h"
#include "attention/mechanisms/routing/routing.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

using RoutingConfig = configs::RoutingAttention;

void select(at::Tensor& x, const at::Tensor& rows_B) {
  if (x.defined()) x = x.index_select(0, rows_B);
}

// The last W keys of each cluster: the next one goes to slot `count` mod W.
struct BucketState final : DecodeState {
  void select_rows(const at::Tensor& rows_B) override {
    cache.select_rows(rows_B);
    for (at::Tensor* each : {&token_BHKW, &count_BHK}) select(*each, rows_B);
  }

  KeyValueCache cache;    // unit keys and values
  at::Tensor token_BHKW;  // int64; -1: none
  at::Tensor count_BHK;   // int64: keys so far
};

// The W tokens so far with the highest scores of each cluster; among equal scores the first.
struct TopTokens {
  void select_rows(const at::Tensor& rows_B) {
    select(score_BHKW, rows_B);
    select(token_BHKW, rows_B);
  }

  // Forgets all tokens of the samples where `where_B` is true.
  void forget(const at::Tensor& where_B) {
    if (!score_BHKW.defined()) return;
    score_BHKW = score_BHKW.masked_fill(where_B.view({-1, 1, 1, 1}), kNone);
    token_BHKW = token_BHKW.masked_fill(where_B.view({-1, 1, 1, 1}), -1);
  }

  // bool [B, H, K]: the clusters that take the token, whose index is higher than all so far.
  at::Tensor add(const at::Tensor& scores_BHK, std::int64_t token, std::int64_t window) {
    if (!score_BHKW.defined()) {
      std::vector<std::int64_t> sizes = scores_BHK.sizes().vec();
      sizes.push_back(window);
      score_BHKW = at::full(sizes, kNone, scores_BHK.options());
      token_BHKW = at::full(sizes, -1, scores_BHK.options().dtype(at::kLong));
    }
    const at::Tensor new_BHK1 =
        scores_BHK.masked_fill(scores_BHK.ne(scores_BHK), -kNone).unsqueeze(3);
    // The worst has the lowest score and, among equal scores, the highest index.
    const at::Tensor lowest_BHK1 = score_BHKW.amin(3, /*keepdim=*/true);
    const at::Tensor worst_BHK1 =
        token_BHKW.masked_fill(score_BHKW > lowest_BHK1, -2).argmax(3, /*keepdim=*/true);
    const at::Tensor takes_BHK1 = new_BHK1 > lowest_BHK1;
    score_BHKW = score_BHKW.scatter(
        3, worst_BHK1, at::where(takes_BHK1, new_BHK1, score_BHKW.gather(3, worst_BHK1)));
    token_BHKW = token_BHKW.scatter(
        3, worst_BHK1, token_BHKW.gather(3, worst_BHK1).masked_fill(takes_BHK1, token));
    return takes_BHK1.squeeze(3);
  }

  static constexpr double kNone = -std::numeric_limits<double>::infinity();
  at::Tensor score_BHKW;
  at::Tensor token_BHKW;  // int64; -1: none
};

struct TopState final : DecodeState {
  void select_rows(const at::Tensor& rows_B) override {
    cache.select_rows(rows_B);
    queries.select_rows(rows_B);
    keys.select_rows(rows_B);
  }

  KeyValueCache cache;  // unit keys and values
  TopTokens queries, keys;
};

// bool [B, H, 1, num_tokens]: the tokens that are listed where visible_BHKW.
at::Tensor as_pairs(const at::Tensor& token_BHKW, const at::Tensor& visible_BHKW,
                    std::int64_t num_tokens) {
  return at::zeros({token_BHKW.size(0), token_BHKW.size(1), num_tokens}, token_BHKW.options())
      .scatter_add(2, token_BHKW.clamp_min(0).flatten(2), visible_BHKW.flatten(2).to(at::kLong))
      .gt(0)
      .unsqueeze(2);
}

}  // namespace

at::Tensor RoutingAttention::visible_tokens(const at::Tensor& in_BHK, const at::Tensor& token_BHKW,
                                            std::int64_t token) const {
  const at::Tensor visible_BHKW = at::logical_and(token_BHKW >= 0, in_BHK.unsqueeze(3));
  if (!config_.share_query_key()) return visible_BHKW;
  const at::Tensor others_BHKW = at::logical_and(visible_BHKW, token_BHKW != token);
  const at::Tensor alone_BH11 =
      others_BHKW.flatten(2).any(2).logical_not().view({in_BHK.size(0), in_BHK.size(1), 1, 1});
  return at::logical_or(others_BHKW, at::logical_and(visible_BHKW, alone_BH11));
}

at::Tensor RoutingAttention::attend_prefixes(const ClusterAttention& in,
                                             const ClusteredTokens& tokens,
                                             at::Tensor& mass) const {
  const std::int64_t L = in.q_BHLD.size(2);
  take_path("attention", {Path::kReference, "prefix_topw computes one query after another"});
  const at::Tensor q_scores_BHLK = cluster_scores(tokens.of_q),
                   k_scores_BHLK = cluster_scores(tokens.of_k),
                   unit_BHLD = unit_queries(in.q_BHLD, tokens.q, length_);
  const at::Tensor document_BL = in.documents.number_BL.expand({in.q_BHLD.size(0), L});
  TopTokens queries, keys;
  std::vector<at::Tensor> out_BH1D;
  for (std::int64_t t = 0; t < L; ++t) {
    if (t > 0) {
      const at::Tensor begins_B = document_BL.select(1, t).ne(document_BL.select(1, t - 1));
      queries.forget(begins_B);
      keys.forget(begins_B);
    }
    const at::Tensor in_BHK = queries.add(q_scores_BHLK.select(2, t), t, window_);
    keys.add(k_scores_BHLK.select(2, t), t, window_);
    const at::Tensor exists_B = document_BL.select(1, t) >= 0;
    const at::Tensor& token_BHKW = keys.token_BHKW;
    const at::Tensor visible_BHKW =
        visible_tokens(at::logical_and(in_BHK, exists_B.view({-1, 1, 1})), token_BHKW, t);
    out_BH1D.push_back(terms_.attend_listed(unit_BHLD.narrow(2, t, 1), tokens.k.unit_BHLD,
                                            in.v_BHLD, token_BHKW, visible_BHKW, t, merge()));
    if (config_.measure_dense_mass()) {
      mass = mass + dense_mass(in, tokens, t, as_pairs(token_BHKW, visible_BHKW, L));
    }
  }
  return at::cat(out_BH1D, 2);
}

std::unique_ptr<DecodeState> RoutingAttention::decode_state(std::int64_t batch) const {
  if (!shape_.causal) return Mechanism::decode_state(batch);
  if (selection() == RoutingConfig::causal_bucket) return std::make_unique<BucketState>();
  return std::make_unique<TopState>();
}

at::Tensor RoutingAttention::decode_step(DecodeState& decode_state,
                                         const AttentionInput& in) const {
  ClusterAttention attention = problem(in, {{}, {}, in.q_BHLD, /*num_documents=*/1});
  attention.selection = ClusterSelection::kCausalBucket;  // the state selects
  const ClusteredTokens tokens = cluster_tokens(attention, Path::kFused);
  const ClusteredRows &q = tokens.q, &k = tokens.k;
  const at::Tensor unit_BH1D = unit_queries(in.q_BHLD, q, length_);

  if (selection() != RoutingConfig::causal_bucket) {
    auto& state = static_cast<TopState&>(decode_state);
    const std::int64_t t = state.cache.size();
    state.cache.append(k.unit_BHLD, in.v_BHSD);
    const at::Tensor in_BHK =
        state.queries.add(cluster_scores(tokens.of_q).select(2, 0), t, window_);
    state.keys.add(cluster_scores(tokens.of_k).select(2, 0), t, window_);
    const at::Tensor& token_BHKW = state.keys.token_BHKW;
    return terms_.attend_listed(unit_BH1D, state.cache.keys(0, t + 1), state.cache.values(0, t + 1),
                                token_BHKW, visible_tokens(in_BHK, token_BHKW, t), t, merge());
  }

  auto& state = static_cast<BucketState&>(decode_state);
  const std::int64_t B = in.q_BHLD.size(0), H = shape_.heads_of_keys(), K = config_.clusters(),
                     t = state.cache.size();
  state.cache.append(k.unit_BHLD, in.v_BHSD);
  const at::TensorOptions numbers = in.q_BHLD.options().dtype(at::kLong);
  if (t == 0) {
    state.token_BHKW = at::full({B, H, K, window_}, -1, numbers);
    state.count_BHK = at::zeros({B, H, K}, numbers);
  }
  const at::Tensor b_B1 = at::arange(B, numbers).unsqueeze(1), h_H = at::arange(H, numbers);
  const at::Tensor to_BH = k.cluster_BHL.select(2, 0).to(at::kLong),
                   from_BH = q.cluster_BHL.select(2, 0).to(at::kLong);
  const at::Tensor slot_BH =
      state.count_BHK.gather(2, to_BH.unsqueeze(2)).squeeze(2).remainder(window_);
  state.token_BHKW.index_put_({b_B1, h_H, to_BH, slot_BH}, at::full({}, t, numbers));
  state.count_BHK.scatter_add_(2, to_BH.unsqueeze(2), at::ones_like(to_BH).unsqueeze(2));
  const at::Tensor token_BH1W = state.token_BHKW.index({b_B1, h_H, from_BH}).unsqueeze(2),
                   in_BH1 = at::ones({B, H, 1}, numbers.dtype(at::kBool));
  return terms_.attend_listed(unit_BH1D, state.cache.keys(0, t + 1), state.cache.values(0, t + 1),
                              token_BH1W, visible_tokens(in_BH1, token_BH1W, t), t, merge());
}

}  // namespace birkhoff
