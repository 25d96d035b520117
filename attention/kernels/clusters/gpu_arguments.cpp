#include "attention/kernels/clusters/gpu_arguments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/counting_sort/counting_sort.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

ClusterShape shape_of(const at::Tensor& x_BHLD, const at::Tensor& centroids_HKD, double length) {
  return {.dtype = kernel_dtype(x_BHLD),
          .batch = static_cast<int>(x_BHLD.size(0)),
          .heads = static_cast<int>(x_BHLD.size(1)),
          .rows = static_cast<int>(x_BHLD.size(2)),
          .head_dim = static_cast<int>(x_BHLD.size(3)),
          .clusters = static_cast<int>(centroids_HKD.size(1)),
          .length = static_cast<float>(length)};
}

std::int64_t bound_of_slots(const ClusterProblem& problem) {
  const std::int64_t L = problem.x_BHLD.size(2), W = std::min(problem.window, L);
  return problem.centroids_HKD.size(1) * std::min(problem.documents.count * W, L);
}

// The lists of nearest rows, whose ends follow from the documents alone, on the device.
void prepare_nearest(const ClusterProblem& problem, ClusterForward& forward) {
  const at::Tensor &x = problem.x_BHLD, &number_BL = problem.documents.number_BL;
  const std::int64_t B = x.size(0), H = x.size(1), L = x.size(2), N = problem.documents.count,
                     K = problem.centroids_HKD.size(1);
  const at::TensorOptions numbers = number_BL.options();
  const at::Tensor size_B1N =
      count_numbers(number_BL.masked_fill(number_BL < 0, N).unsqueeze(1), N + 1).narrow(2, 0, N);
  const at::Tensor document_ends_B1N = size_B1N.cumsum(2).to(at::kInt).contiguous();
  forward.rows.nearest_ends_BHG = size_B1N.clamp_max(problem.window)
                                      .repeat_interleave(K, 2)
                                      .cumsum(2)
                                      .to(at::kInt)
                                      .expand({B, H, N * K})
                                      .contiguous();
  forward.rows.nearest_BHP = at::zeros({B, H, bound_of_slots(problem)}, numbers);
  const at::Tensor keys = at::empty({B, H, ClusterRowsParams::kChunk, L}, numbers);
  ClusterRowsParams& params = forward.params;
  params.num_documents = static_cast<int>(N);
  params.slots = static_cast<int>(forward.rows.nearest_BHP.size(2));
  params.document_ends = document_ends_B1N.const_data_ptr<std::int32_t>();
  params.ends = forward.rows.nearest_ends_BHG.const_data_ptr<std::int32_t>();
  params.nearest = forward.rows.nearest_BHP.mutable_data_ptr<std::int32_t>();
  params.keys = static_cast<std::uint32_t*>(keys.mutable_data_ptr());
  forward.arguments.push_back(document_ends_B1N);
  forward.scratch.push_back(keys);
}

}  // namespace

std::string why_not_gpu_kernels(const ClusterProblem& problem) {
  const at::Tensor& x = problem.x_BHLD;
  std::string why = why_not_dtype(x.scalar_type(), {at::kFloat, at::kBFloat16, at::kHalf});
  if (why.empty()) why = why_not_head_dim(x.size(3), ClusterShape::kMaxHeadDim);
  if (!why.empty()) return why;
  // Bounds the number of rows, of blocks of a launch and of slots.
  constexpr std::int64_t kMaxNumbers = std::numeric_limits<std::int32_t>::max() - 1024;
  const std::int64_t heads = x.size(0) * x.size(1), K = problem.centroids_HKD.size(1);
  const bool fits =
      heads * std::max(x.size(2), ClusterRowsParams::kChunk * problem.documents.count) <=
          kMaxNumbers &&
      heads * K * (ClusterShape::kMaxHeadDim / ClusterSumsParams::kColumns) <= kMaxNumbers &&
      bound_of_slots(problem) <= kMaxNumbers;
  return fits ? "" : kTooManyRows;
}

ClusterForward cluster_forward(const ClusterProblem& problem) {
  const at::Tensor x = with_contiguous_rows(problem.x_BHLD.detach()),
                   centroids = problem.centroids_HKD.contiguous(),
                   documents = problem.documents.number_BL.contiguous();
  const std::int64_t B = x.size(0), H = x.size(1), L = x.size(2);
  const at::TensorOptions sums = centroids.options();
  const at::Tensor best_score_BHL = at::empty({B, H, L}, sums);
  ClusterForward forward{.params = {},
                         .rows = {.unit_BHLD = at::empty_like(x),
                                  .distance_BH = at::empty({B, H}, sums),
                                  .cluster_BHL = at::empty({B, H, L}, sums.dtype(at::kInt)),
                                  .nearest_BHP = {},
                                  .nearest_ends_BHG = {}},
                         .inverse_BHL = at::empty({B, H, L}, sums),
                         .arguments = {x, centroids, documents},
                         .scratch = {best_score_BHL}};
  ClusterRowsParams& params = forward.params;
  params.shape = shape_of(x, centroids, problem.length);
  params.x = rows_params(x);
  params.unit = rows_params(forward.rows.unit_BHLD);
  params.centroids = centroids.const_data_ptr<float>();
  params.documents = documents.const_data_ptr<std::int32_t>();
  params.shared_documents = documents.size(0) == 1;
  params.inverse = forward.inverse_BHL.mutable_data_ptr<float>();
  params.best_score = best_score_BHL.mutable_data_ptr<float>();
  params.cluster = forward.rows.cluster_BHL.mutable_data_ptr<std::int32_t>();
  params.distance = forward.rows.distance_BH.mutable_data_ptr<float>();
  if (problem.window > 0) prepare_nearest(problem, forward);
  return forward;
}

ClusterBackward cluster_backward(const ClusterGradientProblem& problem) {
  const at::Tensor& unit = problem.unit_BHLD;
  const at::Tensor centroids = problem.centroids_HKD.contiguous();
  ClusterBackward backward{
      .params = {}, .d_x_BHLD = at::empty_like(unit), .arguments = {centroids}};
  ClusterGradientParams& params = backward.params;
  params.shape = shape_of(unit, centroids, problem.length);
  params.unit = rows_params(unit);
  params.d_x = rows_params(backward.d_x_BHLD);
  params.centroids = centroids.const_data_ptr<float>();
  params.inverse = problem.inverse_BHL.const_data_ptr<float>();
  params.cluster = problem.cluster_BHL.const_data_ptr<std::int32_t>();
  if (problem.d_unit_BHLD.defined()) {
    const at::Tensor d_unit = with_contiguous_rows(problem.d_unit_BHLD);
    params.d_unit = rows_params(d_unit);
    backward.arguments.push_back(d_unit);
  }
  if (problem.d_distance_BH.defined()) {
    const at::Tensor d_distance = problem.d_distance_BH.contiguous();
    params.d_distance = d_distance.const_data_ptr<float>();
    backward.arguments.push_back(d_distance);
  }
  return backward;
}

ClusterSums cluster_sums_of(const ClusterProblem& problem, const ClusteredRows& rows) {
  const at::Tensor unit = with_contiguous_rows(rows.unit_BHLD.detach()),
                   cluster = rows.cluster_BHL.contiguous();
  const at::Tensor& centroids = problem.centroids_HKD;
  ClusterSums sums{.params = {},
                   .sums_BHKd = at::empty(
                       {unit.size(0), centroids.size(0), centroids.size(1), centroids.size(2) + 1},
                       centroids.options()),
                   .arguments = {unit, cluster}};
  sums.params.shape = shape_of(unit, centroids, problem.length);
  sums.params.unit = rows_params(unit);
  sums.params.cluster = cluster.const_data_ptr<std::int32_t>();
  sums.params.sums = sums.sums_BHKd.mutable_data_ptr<float>();
  return sums;
}

}  // namespace birkhoff
