#include "attention/sinusoidal_distances.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <cmath>

#include "attention/kernels/common/grouped_queries.h"

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

// Column d of row i, which ends at distance 0, moves to the key at that distance from query i: from
// [B, H, L, S] to [B, H, L, S]. A zero before each row makes rows of S + 1; as rows of S, they are
// shifted by one more element each (Dai et al. 2019, appendix B).
at::Tensor to_keys(const at::Tensor& x_BHLS) {
  const std::int64_t L = x_BHLS.size(2), S = x_BHLS.size(3);
  const at::Tensor padded = at::constant_pad_nd(x_BHLS, {1, 0});
  return padded.flatten(2).narrow(2, L, L * S).unflatten(2, {L, S});
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

at::Tensor SinusoidalDistances::scores(const at::Tensor& q_BHLD, const at::Tensor& k_BHSD,
                                       bool trains) const {
  const at::ScalarType type = at::toOpMathType(q_BHLD.scalar_type());
  const at::Tensor q = q_BHLD.to(type), k = to_query_heads(k_BHSD, q.size(1)).to(type);
  const at::Tensor of_keys = at::matmul(q + content_bias_HD.unsqueeze(1), k.transpose(2, 3));
  const at::Tensor of_distances = at::matmul(q + distance_bias_HD.unsqueeze(1),
                                             distance_keys(k.size(2), trains).transpose(1, 2));
  return (of_keys + to_keys(of_distances)) * (1 / std::sqrt(static_cast<double>(q_BHLD.size(3))));
}

at::Tensor SinusoidalDistances::visible(std::int64_t num_queries, std::int64_t num_keys,
                                        bool trains, at::Device device) const {
  const std::int64_t before = num_keys - num_queries;
  const at::Tensor all =
      at::ones({num_queries, num_keys}, at::TensorOptions(at::kBool).device(device));
  const at::Tensor earlier = all.tril(before);
  const std::int64_t window = trains ? 0 : options_.evaluation_window;
  return window > 0 ? earlier.logical_and_(all.triu(before - window + 1)) : earlier;
}

double SinusoidalDistances::forward_flops(std::int64_t num_tokens) const {
  const auto n = static_cast<double>(num_tokens);
  const auto width = static_cast<double>(weight_HDC.size(0) * weight_HDC.size(1));
  return 2 * width * (n * (n + 1) / 2 + n * static_cast<double>(weight_HDC.size(2)));
}

}  // namespace birkhoff
