// Legend: S scores, P weights, N blocks.
#include "attention/kernels/sinkhorn/cpu_prefix.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/common/cpu_sets.h"
#include "attention/kernels/sinkhorn/cpu_sinkhorn.h"
#include "cluster/base/instruction_set.h"

namespace birkhoff {
namespace {

// Calls run(kernels, problem, scratch) for each matrix of `scores`. The problem holds the matrix
// and its parts of the arrays in `all`.
template <typename Run>
void for_each_prefix_problem(const at::Tensor& scores, std::int64_t iterations,
                             std::int64_t first_row, const PrefixBalance& all, const Run& run) {
  const std::int64_t N = scores.size(-1), num_results = N - first_row;
  const std::int64_t grain = std::max<std::int64_t>(1, 1'000'000 / (iterations * N * N * N + 1));
  const PrefixBalanceKernels& kernels = prefix_balance_kernels(instruction_set());
  at::parallel_for(0, num_matrices(scores), grain, [&](std::int64_t begin, std::int64_t end) {
    const ScratchMemory scratch = scratch_memory(kernels.scratch_bytes(
        static_cast<int>(N), static_cast<int>(iterations), /*backward=*/all.d_scores != nullptr));
    for (std::int64_t index = begin; index < end; ++index) {
      PrefixBalance one = all;
      one.size = static_cast<int>(N);
      one.iterations = static_cast<int>(iterations);
      one.first_row = static_cast<int>(first_row);
      one.scores = scores.const_data_ptr<double>() + index * N * N;
      if (one.p != nullptr) one.p += index * num_results * N;
      if (one.solved != nullptr) one.solved += index * num_results;
      if (one.d_p != nullptr) one.d_p += index * num_results * N;
      if (one.d_scores != nullptr) one.d_scores += index * N * N;
      run(kernels, one, scratch.get());
    }
  });
}

}  // namespace

const PrefixBalanceKernels& prefix_balance_kernels(InstructionSet set) {
  return for_set(set, []<InstructionSet kSet>() -> const PrefixBalanceKernels& {
    return compiled_prefix_balance_kernels<kSet>();
  });
}

std::pair<at::Tensor, at::Tensor> prefix_balance_kernel(const at::Tensor& scores,
                                                        std::int64_t iterations,
                                                        std::int64_t first_row) {
  const at::Tensor in = scores.to(at::kDouble);
  at::Tensor p = at::zeros_like(in.narrow(-2, first_row, in.size(-2) - first_row), in.options(),
                                at::MemoryFormat::Contiguous);
  at::Tensor solved = at::zeros_like(p.narrow(-1, 0, 1), in.options().dtype(at::kBool),
                                     at::MemoryFormat::Contiguous);
  PrefixBalance all{};
  all.p = p.mutable_data_ptr<double>();
  all.solved = solved.mutable_data_ptr<bool>();
  for_each_prefix_problem(
      in, iterations, first_row, all,
      [](const auto& kernels, const auto& one, void* scratch) { kernels.forward(one, scratch); });
  return {p.to(scores.scalar_type()), solved};
}

at::Tensor prefix_balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                          std::int64_t iterations, std::int64_t first_row) {
  const at::Tensor in = scores.to(at::kDouble), d_out = d_p.to(at::kDouble);
  at::Tensor d_scores = at::zeros_like(in);
  PrefixBalance all{};
  all.d_p = d_out.const_data_ptr<double>();
  all.d_scores = d_scores.mutable_data_ptr<double>();
  for_each_prefix_problem(
      in, iterations, first_row, all,
      [](const auto& kernels, const auto& one, void* scratch) { kernels.backward(one, scratch); });
  return d_scores.to(scores.scalar_type());
}

}  // namespace birkhoff
