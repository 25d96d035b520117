#include "attention/mechanisms/routing/centroids.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "attention/kernels/clusters/cluster_seeds.h"

namespace birkhoff {
namespace {

// Clusters of a head whose counts are described one by one.
constexpr std::int64_t kMaxListed = 16;

at::Tensor norms(const at::Tensor& x) {
  return at::linalg_vector_norm(x, 2, at::IntArrayRef({-1}), /*keepdim=*/true);
}

// The parts of a statistic's value, [H, K, D] or [H, K, 1].
struct Parts {
  at::Tensor direction, previous, mass, count, idle;

  explicit Parts(const at::Tensor& value_HKV) {
    const std::int64_t D = (value_HKV.size(2) - 3) / 2;
    const auto part = [&](std::int64_t first, std::int64_t size) {
      return value_HKV.narrow(2, first, size);
    };
    direction = part(0, D);
    previous = part(D, D);
    mass = part(2 * D, 1);
    count = part(2 * D + 1, 1);
    idle = part(2 * D + 2, 1);
  }
};

at::Tensor next_value(const Centroids::Options& options, const at::Tensor& value_HKV,
                      const at::Tensor& sums_HKS) {
  const auto [direction, previous, mass, count, idle] = Parts(value_HKV);
  const std::int64_t D = direction.size(2);
  const at::Tensor rows = sums_HKS.narrow(2, D, 1), seeds = sums_HKS.narrow(2, D + 1, D);
  const double w = options.decay;
  const at::Tensor sum = w * mass * direction + (1 - w) * sums_HKS.narrow(2, 0, D);
  const at::Tensor norm = norms(sum), has_rows = rows > 0;
  // Opposite rows may cancel.
  const at::Tensor moves = at::logical_and(has_rows, norm > 0);
  at::Tensor next_direction = at::where(moves, sum / norm.masked_fill(norm == 0, 1), direction);
  // The mass decays without rows, but stays large enough to add the next rows to.
  at::Tensor next_mass = at::where(moves, norm, w * mass).clamp_min(1e-30);
  at::Tensor next_count = w * count + (1 - w) * rows;
  at::Tensor next_idle = (idle + 1).masked_fill(has_rows, 0);
  if (options.reseed_after > 0) {
    const at::Tensor reseeds = at::logical_and(next_idle >= options.reseed_after, norms(seeds) > 0);
    // Seeds may have been rounded to bf16.
    next_direction = at::where(reseeds, seeds / norms(seeds), next_direction);
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
      first_head_(heads * parameters.place().tensor_rank),
      all_heads_(heads * parameters.place().tensor_size),
      value_HKV_(parameters.add_statistic(
          prefix + "." + kName, {heads, options.clusters, 2 * head_dim + 3}, Initializer::normal(1),
          {heads, options.clusters, 2 * head_dim + 1},
          [options](const at::Tensor& value_HKV, const at::Tensor& sums_HKS) {
            return next_value(options, value_HKV, sums_HKS);
          },
          &Centroids::describe)) {
  // Random directions, with mass and count 1.
  const at::Tensor direction = directions() / norms(directions());
  directions().copy_(direction);
  previous().copy_(direction);
  value_HKV_.narrow(2, 2 * head_dim, 2).fill_(1);
  idle_steps().fill_(0);
}

std::string Centroids::describe(const at::Tensor& value_HKV) {
  const Parts parts(value_HKV.detach().to(at::kCPU, at::kDouble));
  const std::int64_t K = value_HKV.size(1);
  std::string text;
  for (std::int64_t h = 0; h < value_HKV.size(0); ++h) {
    const at::Tensor count_K = parts.count[h].flatten().contiguous(),
                     idle_K = parts.idle[h].flatten();
    const at::Tensor directions_KD = parts.direction[h];
    const auto number = [](const at::Tensor& x) { return x.item<double>(); };
    const auto* const counts = count_K.const_data_ptr<double>();
    text += fmt::format(
        "  head {}: moving averages of the rows in a step {} (they start at 1); {} of {} clusters "
        "had none in the last step; the largest has {:.1f} % of the rows",
        h,
        K <= kMaxListed ? fmt::format("{:.4g}", fmt::join(counts, counts + K, ", "))
                        : fmt::format("{:.4g} to {:.4g}, median {:.4g}", number(count_K.min()),
                                      number(count_K.max()), number(count_K.median())),
        idle_K.gt(0).sum().item<std::int64_t>(), K,
        100 * number(count_K.max()) / number(count_K.sum()));
    if (K > 1) {
      const at::Tensor pair_2P = at::triu_indices(K, K, 1);
      const at::Tensor cosine_P =
          at::matmul(directions_KD, directions_KD.t()).index({pair_2P[0], pair_2P[1]}).clamp(-1, 1);
      const at::Tensor degrees_P = cosine_P.acos() * (180 / 3.14159265358979323846);
      text +=
          fmt::format("; angles between centroids {:.1f} to {:.1f} degrees, median {:.1f}",
                      number(degrees_P.min()), number(degrees_P.max()), number(degrees_P.median()));
    }
    text += '\n';
  }
  return text;
}

at::Tensor Centroids::new_seeds(const ClusterProblem& problem, const ClusteredRows& rows,
                                const NoiseKey& noise, Path limit) const {
  if (noise.global_batch == 0) return at::zeros_like(problem.centroids_HKD);
  return draw_rows({problem, rows, noise, first_head_, all_heads_}, limit);
}

}  // namespace birkhoff
