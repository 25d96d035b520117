#include "attention/kernels/block_choice/gpu_arguments.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

#include "attention/kernels/common/fitting_rows.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {

bool fits_gpu_kernels(const BlockChoice& choice) {
  const at::Tensor& q = choice.q_BHLD;
  const at::ScalarType dtype = q.scalar_type();
  constexpr std::int64_t kMostNumbers = std::numeric_limits<std::int32_t>::max() - 1024;
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) &&
         q.size(3) <= BlockChoiceParams::kMostHeadDim &&
         std::min(choice.others, q.size(2) / choice.block) <= BlockChoiceParams::kMostChosen &&
         choice.block <= kMostNumbers && q.size(0) * q.size(1) * q.size(2) <= kMostNumbers;
}

GpuChoice gpu_choice(const BlockChoice& choice, const WholeBlocks& blocks) {
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
