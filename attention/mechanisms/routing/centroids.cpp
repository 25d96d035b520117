#include "attention/mechanisms/routing/centroids.h"

#include <ATen/ATen.h>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

at::Tensor norms(const at::Tensor& x) {
  return at::linalg_vector_norm(x, 2, at::IntArrayRef({-1}), /*keepdim=*/true);
}

at::Tensor next_value(const Centroids::Options& options, const at::Tensor& value_HKV,
                      const at::Tensor& sums_HKS) {
  const std::int64_t D = (value_HKV.size(2) - 3) / 2;
  const auto column = [&](std::int64_t i) { return value_HKV.narrow(2, i, 1); };
  const at::Tensor direction = value_HKV.narrow(2, 0, D), mass = column(2 * D),
                   count = column(2 * D + 1), idle = column(2 * D + 2);
  const at::Tensor rows = sums_HKS.narrow(2, D, 1), seeds = sums_HKS.narrow(2, D + 1, D);
  const double w = options.decay;
  const at::Tensor sum = w * mass * direction + (1 - w) * sums_HKS.narrow(2, 0, D);
  const at::Tensor norm = norms(sum), has_rows = rows > 0;
  // Opposite rows may cancel.
  const at::Tensor moves = at::logical_and(has_rows, norm > 0);
  at::Tensor next_direction = at::where(moves, sum / norm.masked_fill(norm == 0, 1), direction);
  // A mass that decays without rows stays a number that the next rows can be added to.
  at::Tensor next_mass = at::where(moves, norm, w * mass).clamp_min(1e-30);
  at::Tensor next_count = w * count + (1 - w) * rows;
  at::Tensor next_idle = (idle + 1).masked_fill(has_rows, 0);
  if (options.reseed_after > 0) {
    const at::Tensor reseeds = at::logical_and(next_idle >= options.reseed_after, norms(seeds) > 0);
    next_direction = at::where(reseeds, seeds, next_direction);
    next_mass = next_mass.masked_fill(reseeds, 1);
    next_count = next_count.masked_fill(reseeds, 1);
    next_idle = next_idle.masked_fill(reseeds, 0);
  }
  return at::cat({next_direction, direction, next_mass, next_count, next_idle}, 2);
}

}  // namespace

Centroids::Centroids(const Options& options, std::int64_t heads, std::int64_t head_dim,
                     const std::string& prefix, Parameters& parameters)
    : head_dim_(head_dim),
      value_HKV_(parameters.add_statistic(
          prefix + "." + kName, {heads, options.clusters, 2 * head_dim + 3}, Initializer::normal(1),
          {heads, options.clusters, 2 * head_dim + 1},
          [options](const at::Tensor& value_HKV, const at::Tensor& sums_HKS) {
            return next_value(options, value_HKV, sums_HKS);
          })) {
  // Random directions, with mass and count 1.
  const at::Tensor direction = directions() / norms(directions());
  directions().copy_(direction);
  previous().copy_(direction);
  value_HKV_.narrow(2, 2 * head_dim, 2).fill_(1);
  idle_steps().fill_(0);
}

at::Tensor Centroids::sums(const at::Tensor& cluster_sums, const at::Tensor& seeds) {
  return at::cat({cluster_sums, seeds}, 2);
}

at::Tensor Centroids::new_seeds(const ClusterProblem& problem, const ClusteredRows& rows,
                                const NoiseKey& noise) const {
  const std::int64_t H = value_HKV_.size(0), K = value_HKV_.size(1), B = rows.unit_BHLD.size(0),
                     G = noise.global_batch;
  const at::TensorOptions options = problem.centroids_HKD.options();
  if (G == 0) return at::zeros({H, K, head_dim_}, options);
  // One draw for the whole batch. The ids of its samples follow each other, so that exactly one has
  // each remainder.
  NoiseKey of_step = noise;
  of_step.sample_ids_B = at::zeros({1}, noise.sample_ids_B.options());
  const at::Tensor draw_HK2 = philox_uniform(of_step, NoisePurpose::kReseed, {H, K, 2})[0];
  const auto choose = [](const at::Tensor& uniform, const auto& count) {
    return (uniform * count).ceil().to(at::kLong).sub(1);
  };
  const at::Tensor chosen_HK = choose(draw_HK2.select(2, 0), G).clamp(0, G - 1);
  const at::Tensor is_chosen_BHK =
      noise.sample_ids_B.remainder(G).view({B, 1, 1}) == chosen_HK.unsqueeze(0);
  const at::Tensor num_rows_B11 = (problem.documents.number_BL >= 0).sum(1).view({-1, 1, 1});
  const at::Tensor row_BHK =
      choose(draw_HK2.select(2, 1).unsqueeze(0), num_rows_B11).clamp_min(0).expand({B, H, K});
  const at::Tensor row_BHKD = rows.unit_BHLD.detach()
                                  .gather(2, row_BHK.unsqueeze(3).expand({B, H, K, head_dim_}))
                                  .to(options.dtype()) /
                              problem.length;
  return (row_BHKD * is_chosen_BHK.unsqueeze(3)).sum(0);
}

}  // namespace birkhoff
