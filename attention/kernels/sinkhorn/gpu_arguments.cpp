#include "attention/kernels/sinkhorn/gpu_arguments.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "attention/kernels/sinkhorn/gpu_params.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"
#include "cluster/base/text/plural.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

KernelDtype rounded_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf ? KernelDtype::kHalf : KernelDtype::kBFloat16;
}

// The autograd function of the kernels that gpu_launch.cu launches.
struct BalanceOnGpu : torch::autograd::Function<BalanceOnGpu> {
  // The number of elements that the backward pass keeps in memory at one time (192 MiB: the
  // prefixes of 64 matrices of 256 blocks, 5 iterations). A single matrix may need more.
  static constexpr std::int64_t kMaxVectors = (192 << 20) / sizeof(float);

  // Describes problems [.., R, C] to the kernels, without their memory.
  static BalanceParams sizes(const at::Tensor& scores, std::int64_t iterations, BalanceKind kind,
                             std::int64_t first_row) {
    const std::int64_t R = scores.size(-2), C = scores.size(-1);
    return {.matrices = R * C == 0 ? 0 : scores.numel() / (R * C),
            .rows = static_cast<int>(R),
            .columns = static_cast<int>(C),
            .iterations = static_cast<int>(iterations),
            .kind = kind,
            .first_row = static_cast<int>(first_row),
            .results = kind == BalanceKind::kPrefix ? static_cast<int>(R - first_row) : 1,
            .scores = nullptr,
            .p = nullptr,
            .rounded = nullptr,
            .rounded_dtype = KernelDtype::kBFloat16,
            .scratch = nullptr};
  }

  static BalanceParams params(const at::Tensor& scores, std::int64_t iterations, BalanceKind kind,
                              std::int64_t first_row) {
    BalanceParams problems = sizes(scores, iterations, kind, first_row);
    problems.scores = scores.const_data_ptr<float>();
    return problems;
  }

  // Allocates scratch memory for `matrices` of the problems and points `problems` to it. The caller
  // must keep the returned tensor.
  static at::Tensor give_scratch(const at::Tensor& scores, std::int64_t matrices,
                                 BalanceParams& problems) {
    const at::Tensor scratch =
        at::empty({matrices * problems.scratch_per_matrix()}, scores.options());
    problems.scratch = scratch.mutable_data_ptr<float>();
    return scratch;
  }

  // Returns P and, unless `rounded` is empty, P rounded to that dtype.
  static variable_list forward(AutogradContext* context, const at::Tensor& scores,
                               std::int64_t iterations, BalanceKind kind, std::int64_t first_row,
                               std::optional<at::ScalarType> rounded) {
    const at::Tensor dense = scores.contiguous();
    const at::Tensor p = at::empty_like(dense.narrow(-2, first_row, dense.size(-2) - first_row),
                                        at::MemoryFormat::Contiguous);
    BalanceParams problems = params(dense, iterations, kind, first_row);
    problems.p = p.mutable_data_ptr<float>();
    variable_list results{p};
    if (rounded) {
      std::vector<std::int64_t> sizes = p.sizes().vec();
      sizes.back() = BalanceParams::rounded_columns(problems.columns);
      results.push_back(at::empty(sizes, p.options().dtype(*rounded)));
      problems.rounded = results.back().mutable_data_ptr();
      problems.rounded_dtype = rounded_dtype(*rounded);
      context->mark_non_differentiable({results.back()});
    }
    const at::Tensor scratch = give_scratch(dense, problems.matrices, problems);
    if constexpr (kHasGpuKernels) launch_balance(problems, current_stream(dense));
    context->saved_data["iterations"] = iterations;
    context->saved_data["kind"] = static_cast<std::int64_t>(kind);
    context->saved_data["first_row"] = first_row;
    context->save_for_backward({dense});
    context->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const at::Tensor scores = context->get_saved_variables()[0], d_p = gradients[0].contiguous();
    const at::Tensor d_scores = at::empty_like(scores);
    BalanceParams problems = params(scores, context->saved_data["iterations"].toInt(),
                                    static_cast<BalanceKind>(context->saved_data["kind"].toInt()),
                                    context->saved_data["first_row"].toInt());
    const std::int64_t of_matrix = BalanceBackwardParams::vectors_per_matrix(problems);
    const std::int64_t all = problems.matrices;
    if (all == 0) return {d_scores, {}, {}, {}, {}};
    // Parts of equal size, so that each fills the device.
    const std::int64_t most =
        std::max<std::int64_t>(1, kMaxVectors / std::max<std::int64_t>(1, of_matrix));
    const std::int64_t parts = (all + most - 1) / most, at_once = (all + parts - 1) / parts;
    const at::Tensor vectors = at::empty({at_once * of_matrix}, scores.options());
    const at::Tensor scratch = give_scratch(scores, at_once, problems);
    const std::int64_t size = scores.size(-2) * scores.size(-1);
    const std::int64_t result_size = d_p.size(-2) * d_p.size(-1);
    for (std::int64_t first = 0; first < all; first += at_once) {
      problems.matrices = std::min(at_once, all - first);
      problems.scores = scores.const_data_ptr<float>() + first * size;
      const BalanceBackwardParams params{
          .problems = problems,
          .d_p = d_p.const_data_ptr<float>() + first * result_size,
          .vectors = vectors.mutable_data_ptr<float>(),
          .d_scores = d_scores.mutable_data_ptr<float>() + first * size};
      if constexpr (kHasGpuKernels) launch_balance_backward(params, current_stream(scores));
    }
    return {d_scores, {}, {}, {}, {}};
  }
};

}  // namespace

std::string why_not_gpu_kernels(const at::Tensor& scores, std::int64_t iterations, BalanceKind kind,
                                std::int64_t first_row) {
  if (std::string why = why_not_dtype(scores.scalar_type(), {at::kFloat}); !why.empty()) return why;
  if (const std::int64_t N = std::max(scores.size(-2), scores.size(-1));
      N > BalanceParams::kMaxBlocks) {
    return fmt::format("there are {} blocks, more than {}", N, BalanceParams::kMaxBlocks);
  }
  if (kind == BalanceKind::kCumulative && iterations > BalanceParams::kMaxCumulativeIterations) {
    return fmt::format("there are {}, more than {}", counted(iterations, "iteration"),
                       BalanceParams::kMaxCumulativeIterations);
  }
  const BalanceParams sizes = BalanceOnGpu::sizes(scores, iterations, kind, first_row);
  if (BalanceBackwardParams::vectors_per_matrix(sizes) > 2 * BalanceOnGpu::kMaxVectors) {
    return fmt::format("the backward pass of {} takes too much memory",
                       counted(iterations, "iteration"));
  }
  return "";
}

at::Tensor balance_on_gpu(const at::Tensor& scores, std::int64_t iterations, BalanceKind kind,
                          std::int64_t first_row) {
  return BalanceOnGpu::apply(scores, iterations, kind, first_row, std::nullopt)[0];
}

BalancedWeights balance_and_round_on_gpu(const at::Tensor& scores, std::int64_t iterations,
                                         at::ScalarType dtype) {
  const variable_list results =
      BalanceOnGpu::apply(scores, iterations, BalanceKind::kWhole, 0, std::optional(dtype));
  return {.p = results[0], .rounded = results[1]};
}

}  // namespace birkhoff
