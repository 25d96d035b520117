#include "attention/kernels/clusters/cluster_seeds.h"

#include <ATen/ATen.h>

#include "attention/kernels/common/fitting_rows.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

at::Tensor draw_by_operations(const ClusterDraw& draw) {
  const auto& [problem, rows, noise, first_head, all_heads] = draw;
  const std::int64_t H = problem.centroids_HKD.size(0), K = problem.centroids_HKD.size(1),
                     D = problem.centroids_HKD.size(2), B = rows.unit_BHLD.size(0),
                     G = noise.global_batch;
  // One draw for the whole batch. The ids of its samples follow each other, so that exactly one has
  // each remainder.
  NoiseKey of_step = noise;
  of_step.sample_ids_B = at::zeros({1}, noise.sample_ids_B.options());
  const at::Tensor draw_HK2 =
      philox_uniform(of_step, NoisePurpose::kReseed, {all_heads, K, 2})[0].narrow(0, first_head, H);
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
                                  .gather(2, row_BHK.unsqueeze(3).expand({B, H, K, D}))
                                  .to(problem.centroids_HKD.scalar_type()) /
                              problem.length;
  return (row_BHKD * is_chosen_BHK.unsqueeze(3)).sum(0);
}

}  // namespace

ClusterSeedsParams cluster_seeds_params(const ClusterDraw& draw, const at::Tensor& seeds_HKD) {
  const at::Tensor &unit = draw.rows.unit_BHLD, &documents = draw.problem.documents.number_BL;
  return {.shape = {.dtype = kernel_dtype(unit),
                    .batch = static_cast<int>(unit.size(0)),
                    .heads = static_cast<int>(unit.size(1)),
                    .rows = static_cast<int>(unit.size(2)),
                    .head_dim = static_cast<int>(unit.size(3)),
                    .clusters = static_cast<int>(seeds_HKD.size(1)),
                    .length = static_cast<float>(draw.problem.length)},
          .unit = rows_params(unit),
          .documents = documents.const_data_ptr<std::int32_t>(),
          .shared_documents = documents.size(0) == 1,
          .seed = draw.noise.seed,
          .step = draw.noise.step.const_data_ptr<std::int64_t>(),
          .layer = draw.noise.layer,
          .purpose = static_cast<std::uint32_t>(NoisePurpose::kReseed),
          .sample_ids = draw.noise.sample_ids_B.const_data_ptr<std::int64_t>(),
          .global_batch = draw.noise.global_batch,
          .first_head = draw.first_head,
          .seeds = seeds_HKD.mutable_data_ptr<float>()};
}

at::Tensor draw_rows(const ClusterDraw& draw, Path limit) {
  const at::Tensor& centroids = draw.problem.centroids_HKD;
  if constexpr (kHasGpuKernels) {
    if (centroids.is_cuda() && choose_path(draw.problem, limit).path == Path::kFused) {
      ClusterProblem problem = draw.problem;
      problem.documents.number_BL = problem.documents.number_BL.contiguous();
      ClusteredRows rows = draw.rows;
      rows.unit_BHLD = with_contiguous_rows(rows.unit_BHLD.detach());
      NoiseKey noise = draw.noise;
      noise.sample_ids_B = noise.sample_ids_B.contiguous();
      const at::Tensor seeds_HKD = at::empty_like(centroids, at::MemoryFormat::Contiguous);
      launch_cluster_seeds(
          cluster_seeds_params({problem, rows, noise, draw.first_head, draw.all_heads}, seeds_HKD),
          current_stream(seeds_HKD));
      return seeds_HKD;
    }
  }
  return draw_by_operations(draw);
}

}  // namespace birkhoff
