#include "attention/logit_terms.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/masked_softmax.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

// Vectors of length 1, like the embeddings of T2T, whose authors proposed relative positions.
Initializer table_init(std::int64_t head_dim) {
  return Initializer::normal(1 / std::sqrt(static_cast<double>(head_dim)));
}

at::Tensor in_dtype_of(const at::Tensor& parameter, const at::Tensor& q) {
  return parameter.defined() ? parameter.to(q.scalar_type()) : parameter;
}

// The G query heads of a key head are rows of one product with it, so that keys and values need no
// copy for each query head: x [B, query heads, 1, n] as [B, key heads, G, n], and back.
at::Tensor of_key_heads(const at::Tensor& x, std::int64_t key_heads) {
  return x.squeeze(2).unflatten(1, {key_heads, -1});
}
at::Tensor of_query_heads(const at::Tensor& x_BHGn) { return x_BHGn.flatten(1, 2).unsqueeze(2); }

}  // namespace

LogitTerms::LogitTerms(const configs::Mechanism& config, const MechanismShape& shape,
                       const std::string& prefix, Parameters& parameters) {
  const configs::RelativePositions& relative = config.relative_positions();
  if (const std::int64_t most = relative.max_distance(); most > 0) {
    const std::vector<std::int64_t> sizes{relative.per_head() ? shape.heads : 1,
                                          shape.causal ? most + 1 : 2 * most + 1, shape.head_dim};
    const auto table = [&](const char* name) {
      const Initializer init = table_init(shape.head_dim);
      return relative.per_head()
                 ? parameters.add_of_heads(prefix + name, sizes, init, /*decay=*/false)
                 : parameters.add(prefix + name, sizes, init, /*decay=*/false);
    };
    relative_.least = -most;
    relative_.keys_HRD = table(".relative_keys");
    if (relative.values()) relative_.values_HRD = table(".relative_values");
  }
  if (config.sink()) {
    sink_H_ = parameters.add_of_heads(prefix + ".sink", {shape.heads}, Initializer::zeros(),
                                      /*decay=*/false);
  }
}

RelativePositions LogitTerms::relative(const at::Tensor& q_BHLD) const {
  return {.keys_HRD = in_dtype_of(relative_.keys_HRD, q_BHLD),
          .values_HRD = in_dtype_of(relative_.values_HRD, q_BHLD),
          .least = relative_.least};
}

at::Tensor LogitTerms::sink(const at::Tensor& q_BHLD) const { return in_dtype_of(sink_H_, q_BHLD); }

at::Tensor LogitTerms::attend(const at::Tensor& q_BH1D, const at::Tensor& k_BHSD,
                              const at::Tensor& v_BHSD, std::int64_t in_place,
                              const RowNormalizer& normalizer) const {
  if (normalizer.kind == Normalizer::kSoftmax && !relative_.defined() && !sink_H_.defined()) {
    return library_attention(q_BH1D, k_BHSD, v_BHSD);
  }
  const std::int64_t key_heads = k_BHSD.size(1), S = k_BHSD.size(2), before = S - in_place;
  const RelativePositions tables = relative(q_BH1D);
  at::Tensor scores_BH1S = of_query_heads(
                 at::matmul(of_key_heads(q_BH1D, key_heads), k_BHSD.transpose(2, 3))),
             rows_S;
  if (tables.defined()) {
    const at::Tensor last = at::arange(1 - in_place, 1, q_BH1D.options().dtype(at::kLong));
    rows_S = table_rows(tables, last);
    scores_BH1S.narrow(3, before, in_place)
        .add_(relative_scores(tables, q_BH1D.unsqueeze(2), rows_S).squeeze(2));
  }
  const double scale = 1 / std::sqrt(static_cast<double>(q_BH1D.size(3)));
  const at::Tensor p_BH1S =
      normalize_rows(normalizer, scores_BH1S * scale, /*mask=*/{}, sink(q_BH1D));
  const at::Tensor out_BH1D = of_query_heads(at::matmul(of_key_heads(p_BH1S, key_heads), v_BHSD));
  if (!tables.values_HRD.defined()) return out_BH1D;
  const at::Tensor last_p = p_BH1S.narrow(3, before, in_place).unsqueeze(2);
  return out_BH1D + relative_values(tables, last_p, rows_S).squeeze(2);
}

at::Tensor LogitTerms::attend_listed(const at::Tensor& q_BH1D, const at::Tensor& k_BHSD,
                                     const at::Tensor& v_BHSD, const at::Tensor& token_BHKW,
                                     const at::Tensor& visible_BHKW, std::int64_t now,
                                     SlotMerge merge) const {
  const std::int64_t H = q_BH1D.size(1), key_heads = token_BHKW.size(1), K = token_BHKW.size(2),
                     D = q_BH1D.size(3);
  const auto gather = [&](const at::Tensor& x_BHSD) {  // [B, key heads, K, W, D]
    const at::Tensor index =
        token_BHKW.clamp_min(0).flatten(2).unsqueeze(3).expand({-1, -1, -1, D});
    return x_BHSD.gather(2, index).unflatten(2, {K, -1});
  };
  // [B, query heads, K, 1, n] times listed keys or values, [B, key heads, K, n, m], as in
  // of_key_heads().
  const auto product = [&](const at::Tensor& x_BHK1n, const at::Tensor& listed_BHKnm) {
    const at::Tensor rows_BHKGn = x_BHK1n.squeeze(3).unflatten(1, {key_heads, -1}).transpose(2, 3);
    return at::matmul(rows_BHKGn, listed_BHKnm).transpose(2, 3).flatten(1, 2).unsqueeze(3);
  };
  const RelativePositions tables = relative(q_BH1D);
  const at::Tensor q_BHK1D = q_BH1D.unsqueeze(2).expand({-1, -1, K, -1, -1});
  at::Tensor scores_BHK1W = product(q_BHK1D, gather(k_BHSD).transpose(3, 4)), rows_BHK1W;
  if (tables.defined()) {
    rows_BHK1W = to_query_heads(table_rows(tables, token_BHKW - now).unsqueeze(3), H);
    scores_BHK1W = scores_BHK1W + relative_scores(tables, q_BHK1D, rows_BHK1W);
  }
  const at::Tensor logits_BHKW = scores_BHK1W.squeeze(3) * (1 / std::sqrt(static_cast<double>(D))),
                   visible = to_query_heads(visible_BHKW, H), sink_H = sink(q_BH1D);
  const auto sink_as = [&](at::IntArrayRef sizes) {
    return sink_H.defined() ? sink_H.view(sizes) : sink_H;
  };
  const bool one_softmax = merge == SlotMerge::kOneSoftmax;
  const at::Tensor p_BHK1W =
      (one_softmax ? masked_softmax(logits_BHKW.flatten(2), visible.flatten(2), sink_as({1, H, 1}))
                         .view_as(logits_BHKW)
                   : masked_softmax(logits_BHKW, visible, sink_as({1, H, 1, 1})))
          .unsqueeze(3);
  at::Tensor out_BHK1D = product(p_BHK1W, gather(v_BHSD));
  if (tables.values_HRD.defined()) {
    out_BHK1D = out_BHK1D + relative_values(tables, p_BHK1W, rows_BHK1W);
  }
  const at::Tensor sum_BH1D = out_BHK1D.squeeze(3).sum(2, /*keepdim=*/true);
  if (one_softmax) return sum_BH1D;
  const at::Tensor lists_BH11 =
      visible.any(3).sum(2, true).clamp_min(1).unsqueeze(3).to(sum_BH1D.scalar_type());
  return sum_BH1D / lists_BH11;
}

double LogitTerms::forward_flops() const {
  if (!relative_.defined()) return 0;
  const double tables = relative_.values_HRD.defined() ? 2 : 1;
  return 2 * tables * static_cast<double>(relative_.num_distances() * relative_.keys_HRD.size(2));
}

}  // namespace birkhoff
