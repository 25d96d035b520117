#include "attention/kernels/block_top_k/gpu_arguments.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "attention/kernels/common/fitting_rows.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {

std::string why_not_gpu_kernels(const BlockTopK& choice) {
  const at::Tensor& q = choice.q_BHLD;
  std::string why = why_not_dtype(q.scalar_type(), {at::kFloat, at::kBFloat16, at::kHalf});
  if (why.empty()) why = why_not_head_dim(q.size(3), BlockTopKParams::kMaxHeadDim);
  if (!why.empty()) return why;
  const std::int64_t chosen = std::min(choice.others, q.size(2) / choice.block);
  if (chosen > BlockTopKParams::kMaxChosen) {
    return fmt::format("a query chooses {} blocks, more than {}", chosen,
                       BlockTopKParams::kMaxChosen);
  }
  constexpr std::int64_t kMaxNumbers = std::numeric_limits<std::int32_t>::max() - 1024;
  const bool fits = choice.block <= kMaxNumbers && q.size(0) * q.size(1) * q.size(2) <= kMaxNumbers;
  return fits ? "" : kTooManyRows;
}

GpuChoice gpu_top_k(const BlockTopK& choice, const WholeBlocks& blocks) {
  const at::Tensor q = with_contiguous_rows(choice.q_BHLD.detach()),
                   means = blocks.mean_BHND.contiguous(),
                   documents = choice.documents.number_BL.contiguous(),
                   block_documents = blocks.document_BN.contiguous();
  const std::int64_t N = means.size(2), C = std::min(choice.others, N);
  GpuChoice gpu{.params = {},
                .chosen_BHLC = at::empty({q.size(0), q.size(1), q.size(2), C}, documents.options()),
                .arguments = {q, means, documents, block_documents}};
  gpu.params = {.dtype = kernel_dtype(q),
                .batch = static_cast<int>(q.size(0)),
                .heads = static_cast<int>(q.size(1)),
                .queries = static_cast<int>(q.size(2)),
                .head_dim = static_cast<int>(q.size(3)),
                .block = static_cast<int>(choice.block),
                .blocks = static_cast<int>(N),
                .chosen = static_cast<int>(C),
                .causal = choice.causal,
                .q = rows_params(q),
                .means = means.const_data_ptr<float>(),
                .documents = documents.const_data_ptr<std::int32_t>(),
                .block_documents = block_documents.const_data_ptr<std::int32_t>(),
                .shared_documents = documents.size(0) == 1,
                .result = gpu.chosen_BHLC.mutable_data_ptr<std::int32_t>()};
  return gpu;
}

}  // namespace birkhoff
