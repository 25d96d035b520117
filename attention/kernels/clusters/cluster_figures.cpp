#include "attention/kernels/clusters/cluster_figures.h"

#include <ATen/ATen.h>

#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

at::Tensor count_by_operations(const ClusterCounts& counts) {
  const at::Tensor& cluster_BHL = counts.cluster_BHL;
  const at::TensorOptions options = counts.idle_steps_HK.options();
  const std::int64_t B = cluster_BHL.size(0), H = counts.idle_steps_HK.size(0),
                     K = counts.idle_steps_HK.size(1);
  const at::Tensor compared_BHM = cluster_BHL.slice(2, 0, std::nullopt, counts.compared),
                   exists_BHL = cluster_BHL.ge(0).to(options.dtype());
  const at::Tensor rows_BHK =
      at::zeros({B, H, K}, options)
          .scatter_add(2, cluster_BHL.clamp_min(0).to(at::kLong), exists_BHL);
  // In integers, which do not round.
  const auto sum = [&](const at::Tensor& x) { return x.sum(at::kLong).to(options.dtype()); };
  // In the order of ClusterFigure.
  return at::stack({sum(counts.before_BHM.ne(compared_BHM)), sum(compared_BHM.ge(0)),
                    sum(rows_BHK.amax(2).to(at::kLong)), sum(cluster_BHL.ge(0)),
                    sum(counts.idle_steps_HK.gt(0)), at::full({}, H * K, options)});
}

}  // namespace

ClusterCountsParams cluster_counts_params(const ClusterCounts& counts, const at::Tensor& of_heads) {
  const at::Tensor& idle_HK = counts.idle_steps_HK;
  return {.batch = static_cast<int>(counts.cluster_BHL.size(0)),
          .heads = static_cast<int>(idle_HK.size(0)),
          .rows = static_cast<int>(counts.cluster_BHL.size(2)),
          .compared = static_cast<int>(counts.compared),
          .clusters = static_cast<int>(idle_HK.size(1)),
          .cluster = counts.cluster_BHL.const_data_ptr<std::int32_t>(),
          .before = counts.before_BHM.const_data_ptr<std::int32_t>(),
          .idle_steps = idle_HK.const_data_ptr<float>(),
          .idle_strides = {idle_HK.stride(0), idle_HK.stride(1)},
          .counts = of_heads.mutable_data_ptr<std::int32_t>()};
}

at::Tensor count_clusters(const ClusterCounts& counts, Path limit) {
  if constexpr (kHasGpuKernels) {
    if (limit == Path::kFused && counts.cluster_BHL.is_cuda() &&
        counts.idle_steps_HK.scalar_type() == at::kFloat &&
        counts.idle_steps_HK.size(1) <= ClusterCountsParams::kMaxClusters) {
      ClusterCounts in = counts;
      in.cluster_BHL = counts.cluster_BHL.contiguous();
      in.before_BHM = counts.before_BHM.contiguous();
      const at::Tensor of_heads =
          at::empty({in.cluster_BHL.size(0) * in.cluster_BHL.size(1), kNumClusterFigures},
                    in.cluster_BHL.options());
      launch_cluster_counts(cluster_counts_params(in, of_heads), current_stream(of_heads));
      return of_heads.sum(at::IntArrayRef({0}), /*keepdim=*/false, at::kLong).to(at::kFloat);
    }
  }
  return count_by_operations(counts);
}

}  // namespace birkhoff
