#include "attention/sinusoidal_distances.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>

namespace birkhoff {
namespace {

// [S, C]: sines, then cosines, of d / 10,000^(2i / C) (Vaswani et al. 2017, section 3.5). In fp64,
// because distances may be large.
at::Tensor sinusoids(const at::Tensor& distance_S, std::int64_t channels) {
  const at::Tensor frequency = at::arange(0, channels, 2, distance_S.options())
                                   .mul(-std::log(1e4) / static_cast<double>(channels))
                                   .exp();
  const at::Tensor angle = distance_S.unsqueeze(1) * frequency;
  return at::cat({angle.sin(), angle.cos()}, 1).narrow(1, 0, channels);
}

}  // namespace

SinusoidalDistances::SinusoidalDistances(const MechanismShape& shape, const std::string& prefix,
                                         Parameters& parameters)
    : options_(*shape.distances) {
  const Initializer init = Initializer::normal(0.02);
  const auto add = [&](const char* name, at::IntArrayRef sizes, bool decay) {
    return parameters.add_of_heads(prefix + name, sizes, init, decay);
  };
  weight_HDC = add(".distance_keys", {shape.heads, shape.head_dim, shape.channels}, /*decay=*/true);
  content_bias_HD = add(".content_bias", {shape.heads, shape.head_dim}, /*decay=*/false);
  distance_bias_HD = add(".distance_bias", {shape.heads, shape.head_dim}, /*decay=*/false);
}

at::Tensor SinusoidalDistances::distance_keys(std::int64_t num_keys, bool trains) const {
  const auto fp64 = at::TensorOptions(at::kDouble).device(weight_HDC.device());
  at::Tensor distance_S = at::arange(num_keys - 1, -1, -1, fp64);
  if (!trains && options_.evaluation_clamp > 0) {
    distance_S = distance_S.clamp_max(static_cast<double>(options_.evaluation_clamp));
  }
  const at::Tensor r_SC = sinusoids(distance_S, weight_HDC.size(2)).to(weight_HDC.scalar_type());
  return at::matmul(r_SC, weight_HDC.transpose(1, 2));
}

void SinusoidalDistances::add_to(RowAttention& attention, bool trains) const {
  const at::Tensor q = attention.q_BHLD.to(at::toOpMathType(attention.q_BHLD.scalar_type()));
  const at::Tensor keys_HSD = distance_keys(attention.k_BHSD.size(2), trains).to(q.scalar_type());
  attention.q_BHLD = q + content_bias_HD.unsqueeze(1);
  attention.distance_terms_BHLS =
      at::matmul(q + distance_bias_HD.unsqueeze(1), keys_HSD.transpose(1, 2));
}

void SinusoidalDistances::add_to(GatheredAttention& attention, bool trains) const {
  at::Tensor& q = attention.q_BHLD;
  const at::ScalarType type = q.scalar_type(), sums = at::toOpMathType(type);
  const std::int64_t L = q.size(2), S = attention.k_BHSD.size(2);
  const at::Tensor keys_HSD = distance_keys(S, trains).to(sums),
                   v_less_u_HD = (distance_bias_HD - content_bias_HD).to(sums);
  q = (q.to(sums) + content_bias_HD.unsqueeze(1)).to(type);
  // Row r of the table is for keys at j = l + r + 1 - L, whose distance is S - 1 - r.
  attention.relative = {.keys_HRD = keys_HSD.to(type),
                        .values_HRD = {},
                        .bias_HR = at::matmul(keys_HSD, v_less_u_HD.unsqueeze(2)).squeeze(2),
                        .least = 1 - L};
  DistanceBand& band = attention.rows.band;
  if (window(trains) > 0) band.most = std::min(band.most, window(trains) - 1 + L - S);
}

at::Tensor SinusoidalDistances::first_keys(std::int64_t num_queries, std::int64_t num_keys,
                                           bool trains, at::Device device) const {
  if (window(trains) == 0) return {};
  const std::int64_t first = num_keys - num_queries + 1 - window(trains);
  return at::arange(first, first + num_queries, at::TensorOptions(at::kInt).device(device))
      .clamp_min(0)
      .unsqueeze(0);
}

double SinusoidalDistances::forward_flops(std::int64_t num_tokens) const {
  const auto n = static_cast<double>(num_tokens);
  const auto width = static_cast<double>(weight_HDC.size(0) * weight_HDC.size(1));
  return 2 * width * (n * (n + 1) / 2 + n * static_cast<double>(weight_HDC.size(2)));
}

}  // namespace birkhoff
