#include "launcher/analysis/map_figures.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace birkhoff {
namespace {

// Rounding leaves weights slightly below 0.
at::Tensor weights_of(const at::Tensor& map_LS) { return map_LS.to(at::kDouble).clamp_min(0); }

at::Tensor as_distributions(const at::Tensor& p_LS) {
  return p_LS / p_LS.sum(1, /*keepdim=*/true).clamp_min(1e-300);
}

at::Tensor entropy_L(const at::Tensor& p_LS) { return -at::xlogy(p_LS, p_LS).sum(1); }

double mean_where(const at::Tensor& x_L, const at::Tensor& sees_L) {
  return x_L.masked_select(sees_L).mean().item<double>();  // NaN: nowhere
}

at::Tensor sees_key(const at::Tensor& p_LS) { return p_LS.sum(1) > 0; }

}  // namespace

BalanceErrors balance_errors(const at::Tensor& map_LS) {
  const at::Tensor p_LS = weights_of(map_LS), row_L = p_LS.sum(1);
  const auto largest = [](const at::Tensor& x) { return x.abs().max().item<double>(); };
  return {.rows = largest((row_L - 1).masked_fill(row_L == 0, 0)),
          .columns = largest(p_LS.sum(0) - 1)};
}

double mean_entropy(const at::Tensor& map_LS) {
  const at::Tensor p_LS = weights_of(map_LS);
  return mean_where(entropy_L(as_distributions(p_LS)), sees_key(p_LS));
}

double mean_reach(const at::Tensor& map_LS) {
  const at::Tensor p_LS = weights_of(map_LS);
  const at::Tensor query_L = at::arange(p_LS.size(0), at::kDouble),
                   key_S = at::arange(p_LS.size(1), at::kDouble);
  const at::Tensor distance_LS = (query_L.unsqueeze(1) - key_S).abs();
  return mean_where((as_distributions(p_LS) * distance_LS).sum(1), sees_key(p_LS));
}

double mean_divergence(const at::Tensor& map_LS, const at::Tensor& other_LS) {
  const at::Tensor weights_LS = weights_of(map_LS), others_LS = weights_of(other_LS);
  const at::Tensor p_LS = as_distributions(weights_LS), q_LS = as_distributions(others_LS);
  const at::Tensor divergence_L =
      entropy_L((p_LS + q_LS) / 2) - (entropy_L(p_LS) + entropy_L(q_LS)) / 2;
  return mean_where(divergence_L.clamp_min(0), sees_key(weights_LS) & sees_key(others_LS));
}

double distance_to_rank_one(const at::Tensor& x_TC) {
  const at::Tensor x = x_TC.to(at::kDouble);
  const auto norm = [](const at::Tensor& m) {
    const at::Tensor size = m.abs();
    return std::sqrt(size.sum(0).max().item<double>() * size.sum(1).max().item<double>());
  };
  return norm(x - x.mean(0, /*keepdim=*/true)) / norm(x);
}

}  // namespace birkhoff
