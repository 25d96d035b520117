// The conversion of tensors to arguments of the GPU's kernels (gpu_params.h). Legend: see
// row_attention.h.
#pragma once

#include <string>
#include <vector>

#include "attention/kernels/row_normalizer/gpu_params.h"
#include "attention/kernels/row_normalizer/saved_rows.h"

namespace birkhoff {

// Why the kernels do not support this, regardless of where its tensors are; empty if they do.
std::string why_not_gpu_rows(const RowAttention& in);

// `params` point to `tensors`, too, which must outlive the launch, like all tensors that were
// passed.
template <typename Params>
struct RowArguments {
  Params params;
  std::vector<at::Tensor> tensors;
};

// Rows must be aligned to 16 bytes. For the forward pass x has no gradients; for the backward pass,
// it has all. d_terms, if there are terms of distances, holds zeros.
RowArguments<TopKParams> top_k_arguments(const RowTensors& x, const SavedRows& saved);
// d_alpha_BHL, if it is defined, gets each query's term of the gradient of the exponents, in fp32.
RowArguments<EntmaxParams> entmax_arguments(const RowTensors& x, const SavedRows& saved,
                                            const at::Tensor& d_alpha_BHL);

}  // namespace birkhoff
