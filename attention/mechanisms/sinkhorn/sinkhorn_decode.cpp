// Sinkhorn attention, decoded one token after another: a block's weights are computed at its first
// token. Legend: B batch, H heads, S tokens so far, N blocks so far, b tokens of a block, C
// channels, D head dim.
#include <ATen/ATen.h>

#include "attention/kernels/block_mix/block_mix.h"
#include "attention/key_value_cache.h"
#include "attention/mechanisms/sinkhorn/sinkhorn.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

using Config = configs::SinkhornAttention;

struct SinkhornDecodeState final : DecodeState {
  void select_rows(const at::Tensor& rows_B) override {
    cache.select_rows(rows_B);
    const auto select = [&](at::Tensor& rows) {
      if (rows.defined()) rows = rows.index_select(0, rows_B);
    };
    for (at::Tensor& psi : psi_BC) select(psi);
    for (at::Tensor& source : source_BC) select(source);
    for (at::Tensor* each : {&sum_BC, &block_sum_BC, &sorted_k_BHbD, &sorted_v_BHbD}) select(*each);
    // Without a SortNet all rows share one.
    if (weights_BHN.defined() && weights_BHN.size(0) > 1) select(weights_BHN);
  }

  KeyValueCache cache;
  std::vector<at::Tensor> psi_BC, source_BC;  // of each block begun; of each complete block
  at::Tensor sum_BC, block_sum_BC;            // sums of x: of all tokens; of the current block
  at::Tensor weights_BHN;                     // of the current block, over blocks 0..u
  at::Tensor sorted_k_BHbD, sorted_v_BHbD;    // mixes of complete blocks; undefined in block 0
};

}  // namespace

std::unique_ptr<DecodeState> SinkhornAttention::decode_state(std::int64_t batch) const {
  if (!shape_.causal) return Mechanism::decode_state(batch);
  return std::make_unique<SinkhornDecodeState>();
}

at::Tensor SinkhornAttention::decode_step(DecodeState& decode_state,
                                          const AttentionInput& in) const {
  auto& state = static_cast<SinkhornDecodeState&>(decode_state);
  const std::int64_t t = state.cache.size(), b = config_.block(), u = t / b;
  const at::Tensor x_BC = in.x_q_BLC.select(1, 0);
  const at::Tensor wide_x_BC = x_BC.scalar_type() == at::kDouble ? x_BC : x_BC.to(at::kFloat);
  state.cache.append(in.k_BHSD, config_.tie_key_value() ? in.k_BHSD : in.v_BHSD);
  state.sum_BC = t == 0 ? wide_x_BC : state.sum_BC + wide_x_BC;

  if (t % b == 0) {  // a block begins: compute its weights
    if (u > 0) state.source_BC.push_back(state.block_sum_BC / b);
    state.block_sum_BC = at::zeros_like(wide_x_BC);
    switch (config_.pooling()) {
      case Config::first:
        state.psi_BC.push_back(wide_x_BC);
        break;
      case Config::sum:
        state.psi_BC.push_back(state.sum_BC);
        break;
      case Config::mean:
      case Config::cumulative_mean:
        state.psi_BC.push_back(state.sum_BC / (t + 1));
        break;
    }
    if (u > 0 || leaky()) {
      at::Tensor scores_BHNN = at::zeros({1, 1, u + 1, u + 1}, x_BC.options());
      if (sort_net_) {
        // Block u itself is not a source yet: its feature is never read.
        std::vector<at::Tensor> sources = state.source_BC;
        sources.push_back(state.block_sum_BC);
        scores_BHNN = sort_net_->scores(at::stack(state.psi_BC, 1), at::stack(sources, 1), {});
      }
      const at::Tensor all_BH1N =
          weights(scores_BHNN, /*open_BNN=*/{}, u, in.k_BHSD.scalar_type(), Path::kFused).p;
      const at::Tensor weights_BH1N = keep(all_BH1N, largest_sources(all_BH1N));
      state.weights_BHN = weights_BH1N.select(2, 0);
      const at::Tensor past_BH1N = weights_BH1N.narrow(3, 0, u);
      const auto mix_past = [&](const at::Tensor& x_BHSD) {
        return mix_blocks(past_BH1N, x_BHSD.unflatten(2, {u, b})).select(2, 0);
      };
      state.sorted_k_BHbD = mix_past(state.cache.keys(0, u * b));
      state.sorted_v_BHbD = mix_past(state.cache.values(0, u * b));
    }
  }
  state.block_sum_BC = state.block_sum_BC + wide_x_BC;

  const std::int64_t num_own = t + 1 - u * b;
  const at::Tensor own_k = state.cache.keys(u * b, t + 1), own_v = state.cache.values(u * b, t + 1);
  // To these keys, of which the last `in_place` are own ones.
  const auto attend = [&](const at::Tensor& k, const at::Tensor& v, std::int64_t in_place) {
    return terms_.attend(in.q_BHLD, k, v, in_place);
  };
  if (!state.sorted_k_BHbD.defined()) return attend(own_k, own_v, num_own);

  // Only aligned positions, up to the query's own.
  at::Tensor sorted_k = state.sorted_k_BHbD, sorted_v = state.sorted_v_BHbD;
  if (leaky() || config_.combine() == Config::add_logits) {
    sorted_k = sorted_k.narrow(2, 0, num_own);
    sorted_v = sorted_v.narrow(2, 0, num_own);
  }
  if (leaky()) {
    const at::Tensor own_weight =
        state.weights_BHN.narrow(2, u, 1).unsqueeze(3).to(own_k.scalar_type());
    sorted_k = sorted_k + own_weight * own_k;
    sorted_v = sorted_v + own_weight * own_v;
  }
  switch (config_.combine()) {
    case Config::concat:
      return attend(at::cat({sorted_k, own_k}, 2), at::cat({sorted_v, own_v}, 2), num_own);
    case Config::add_outputs:
      return attend(sorted_k, sorted_v, 0) + attend(own_k, own_v, num_own);
    case Config::add_logits:
      return attend(sorted_k + own_k, sorted_v, 0);
  }
  require(false, "unknown combine");
  return {};
}

}  // namespace birkhoff
