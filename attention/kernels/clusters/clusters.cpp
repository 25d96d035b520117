#include "attention/kernels/clusters/clusters.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

#include "attention/kernels/clusters/cpu_clusters.h"
#include "attention/kernels/clusters/gpu_arguments.h"
#include "attention/kernels/counting_sort/counting_sort.h"
#include "attention/kernels/gathered_attention/gathered_attention.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check(const ClusterProblem& problem) {
  const at::Tensor &x = problem.x_BHLD, &centroids = problem.centroids_HKD;
  require(x.dim() == 4 && x.numel() > 0 && x.is_floating_point(),
          "clusters: x must be [B, H, L, D], not empty");
  require(centroids.dim() == 3 && centroids.size(0) == x.size(1) && centroids.size(1) > 0 &&
              centroids.size(2) == x.size(3) && centroids.device() == x.device() &&
              centroids.scalar_type() == at::toOpMathType(x.scalar_type()),
          "clusters: centroids must be [H, K, D], of the dtype of x's sums, on its device");
  const at::Tensor& number_BL = problem.documents.number_BL;
  require(number_BL.dim() == 2 && number_BL.scalar_type() == at::kInt &&
              (number_BL.size(0) == 1 || number_BL.size(0) == x.size(0)) &&
              number_BL.size(1) == x.size(2) && number_BL.device() == x.device(),
          "clusters: documents must be those of the rows");
}

// [B, H, L]: the index of the row's document; the same for all heads.
at::Tensor documents_BHL(const ClusterProblem& problem) {
  return problem.documents.number_BL.to(at::kLong).unsqueeze(1).expand(
      {problem.x_BHLD.size(0), problem.x_BHLD.size(1), -1});
}

void choose_nearest(const ClusterProblem& problem, const at::Tensor& scores_BHLK,
                    ClusteredRows& rows) {
  const std::int64_t N = problem.documents.count, K = scores_BHLK.size(3), L = scores_BHLK.size(2),
                     W = std::min(problem.window, L);
  const double most = std::numeric_limits<double>::infinity();
  const at::Tensor scores_BHKL =
      scores_BHLK.masked_fill(scores_BHLK.ne(scores_BHLK), most).transpose(2, 3);
  const at::Tensor document_BHL = documents_BHL(problem);
  std::vector<at::Tensor> segments, chosen;  // of each document: [B, H, K W]
  for (std::int64_t n = 0; n < N; ++n) {
    const at::Tensor outside_BH1L = (document_BHL != n).unsqueeze(2);
    const at::Tensor order_BHKW =
        std::get<1>(at::sort(scores_BHKL.masked_fill(outside_BH1L, -most),
                             std::optional<bool>(true), /*dim=*/3, /*descending=*/true))
            .narrow(3, 0, W);
    const at::Tensor left_out_BHKW = outside_BH1L.expand_as(scores_BHKL).gather(3, order_BHKW);
    const at::Tensor cluster_K1 = at::arange(n * K, (n + 1) * K, order_BHKW.options()).unsqueeze(1);
    segments.push_back(
        cluster_K1.expand_as(order_BHKW).masked_fill(left_out_BHKW, N * K).flatten(2));
    chosen.push_back(order_BHKW.flatten(2));
  }
  // Sorted by segment, then by row.
  const at::Tensor segment_BHP = at::cat(segments, 2);
  const at::Tensor keys_BHP = std::get<0>(
      at::sort(segment_BHP * L + at::cat(chosen, 2), std::optional<bool>(true), /*dim=*/2));
  rows.nearest_BHP = at::remainder(keys_BHP, L).to(at::kInt);
  rows.nearest_ends_BHG =
      count_numbers(segment_BHP, N * K + 1).cumsum(2).narrow(2, 0, N * K).to(at::kInt);
}

ClusteredRows cluster_rows_reference(const ClusterProblem& problem) {
  const at::Tensor centroids_HKD = problem.centroids_HKD.detach();
  const at::Tensor unit_BHLD = unit_rows(problem.x_BHLD.to(centroids_HKD.scalar_type()), 1);
  const at::Tensor scores_BHLK = cluster_scores(problem);
  const at::Tensor cluster_BHL = scores_BHLK.argmax(3);
  const at::Tensor chosen_BHLD = centroids_HKD.unsqueeze(0)
                                     .expand({unit_BHLD.size(0), -1, -1, -1})
                                     .gather(2, cluster_BHL.unsqueeze(3).expand_as(unit_BHLD));
  const at::Tensor padding_BHL = documents_BHL(problem) < 0;
  ClusteredRows rows;
  rows.unit_BHLD = (unit_BHLD * problem.length).to(problem.x_BHLD.scalar_type());
  rows.distance_BH = (unit_BHLD - chosen_BHLD).square().sum(3).masked_fill(padding_BHL, 0).sum(2);
  rows.cluster_BHL = cluster_BHL.masked_fill(padding_BHL, -1).to(at::kInt);
  if (problem.window > 0) choose_nearest(problem, scores_BHLK, rows);
  return rows;
}

// The kernels of the device, asynchronous on a GPU's current stream.

// Fills in `rows`; returns the inverse norms.
at::Tensor fused_rows(const ClusterProblem& problem, ClusteredRows& rows) {
  if (problem.x_BHLD.is_cpu()) return cluster_rows_on_cpu(problem, rows);
  const ClusterForward forward = cluster_forward(problem);
  if constexpr (kHasGpuKernels) {
    launch_cluster_rows(forward.params, current_stream(problem.x_BHLD));
  }
  rows = forward.rows;
  return forward.inverse_BHL;
}

at::Tensor fused_gradients(const ClusterGradientProblem& problem) {
  if (problem.unit_BHLD.is_cpu()) return cluster_gradients_on_cpu(problem);
  const ClusterBackward backward = cluster_backward(problem);
  if constexpr (kHasGpuKernels) {
    launch_cluster_gradients(backward.params, current_stream(problem.unit_BHLD));
  }
  return backward.d_x_BHLD;
}

at::Tensor fused_sums(const ClusterProblem& problem, const ClusteredRows& rows) {
  if (rows.unit_BHLD.is_cpu()) return cluster_sums_on_cpu(problem, rows);
  const ClusterSums sums = cluster_sums_of(problem, rows);
  if constexpr (kHasGpuKernels) launch_cluster_sums(sums.params, current_stream(rows.unit_BHLD));
  return sums.sums_BHKd.sum(0);
}

// Defines the gradients of the kernels' unit vectors and distances.
struct FusedClusterRows : torch::autograd::Function<FusedClusterRows> {
  static variable_list forward(AutogradContext* context, const at::Tensor& /*x_BHLD*/,
                               const ClusterProblem& problem, ClusteredRows& rows) {
    const at::Tensor inverse_BHL = fused_rows(problem, rows);
    context->save_for_backward(
        {rows.unit_BHLD, inverse_BHL, rows.cluster_BHL, problem.centroids_HKD});
    context->saved_data["length"] = problem.length;
    context->set_materialize_grads(false);
    return {rows.unit_BHLD, rows.distance_BH};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    return {fused_gradients({.unit_BHLD = saved[0],
                             .inverse_BHL = saved[1],
                             .cluster_BHL = saved[2],
                             .centroids_HKD = saved[3],
                             .length = context->saved_data["length"].toDouble(),
                             .d_unit_BHLD = gradients[0],
                             .d_distance_BH = gradients[1]}),
            {},
            {}};
  }
};

}  // namespace

Documents::Documents(const at::Tensor& segments_BL, const at::Tensor& lengths_B,
                     const at::Tensor& x_BHLD, std::int64_t num_documents)
    : has_padding(lengths_B.defined()) {
  const at::TensorOptions options = x_BHLD.options().dtype(at::kInt).requires_grad(false);
  const std::int64_t L = x_BHLD.size(2);
  number_BL = at::zeros({1, L}, options);
  if (segments_BL.defined()) {
    number_BL = document_numbers(segments_BL);
    // The exact number makes the shortest lists, and costs nothing on the CPU.
    if (num_documents > 0 && !number_BL.is_cpu()) {
      count = num_documents;
    } else if (!number_BL.is_meta()) {
      count = number_BL.max().item<std::int32_t>() + 1;
    }
  }
  if (lengths_B.defined()) {
    const at::Tensor padding_BL = at::arange(L, lengths_B.options()) >= lengths_B.unsqueeze(1);
    number_BL = number_BL.expand_as(padding_BL).masked_fill(padding_BL, -1);
  }
  number_BL = number_BL.contiguous();
}

PathChoice choose_path(const ClusterProblem& problem, Path limit) {
  if (limit != Path::kFused) return {};
  const at::Tensor& x = problem.x_BHLD;
  return fused_unless(why_not_fused(
      x, [&] { return why_not_tiles(x.scalar_type(), x.size(3)); },
      [&] { return why_not_gpu_kernels(problem); }));
}

ClusteredRows cluster_rows(const ClusterProblem& problem, Path limit) {
  check(problem);
  if (take_path("clusters", choose_path(problem, limit)) == Path::kReference) {
    return cluster_rows_reference(problem);
  }
  ClusteredRows rows;
  const variable_list differentiable = FusedClusterRows::apply(problem.x_BHLD, problem, rows);
  rows.unit_BHLD = differentiable[0];
  rows.distance_BH = differentiable[1];
  return rows;
}

at::Tensor unit_rows(const at::Tensor& x, double length) {
  const at::Tensor norm = at::linalg_vector_norm(x, 2, at::IntArrayRef({-1}), true);
  const at::Tensor is_zero = norm == 0;
  return (x / norm.masked_fill(is_zero, 1)).masked_fill(is_zero, 0) * length;
}

at::Tensor cluster_scores(const ClusterProblem& problem) {
  const c10::AutoGradMode no_gradients(false);
  const at::Tensor& centroids_HKD = problem.centroids_HKD;
  const at::Tensor x_BHLD = problem.x_BHLD.to(centroids_HKD.scalar_type());
  return at::matmul(unit_rows(x_BHLD, 1), centroids_HKD.transpose(1, 2).unsqueeze(0));
}

at::Tensor cluster_sums(const ClusterProblem& problem, const ClusteredRows& rows, Path limit) {
  const at::Tensor& centroids_HKD = problem.centroids_HKD;
  if (take_path("clusters", choose_path(problem, limit)) == Path::kFused) {
    return fused_sums(problem, rows);
  }
  const std::int64_t B = rows.unit_BHLD.size(0), H = centroids_HKD.size(0),
                     K = centroids_HKD.size(1), D = centroids_HKD.size(2);
  const at::Tensor unit_BHLD =
      rows.unit_BHLD.detach().to(centroids_HKD.scalar_type()) / problem.length;
  const at::Tensor with_one_BHLD =
      at::cat({unit_BHLD, at::ones_like(unit_BHLD.narrow(3, 0, 1))}, 3);
  // Padding goes to cluster K.
  const at::Tensor cluster_BHL =
      rows.cluster_BHL.to(at::kLong).masked_fill(rows.cluster_BHL < 0, K);
  return at::zeros({B, H, K + 1, D + 1}, centroids_HKD.options())
      .scatter_add(2, cluster_BHL.unsqueeze(3).expand_as(with_one_BHLD), with_one_BHLD)
      .narrow(2, 0, K)
      .sum(0);
}

}  // namespace birkhoff
