// Arguments of the GPU kernels of attention over gathered rows, made from tensors, with the results
// and the scratch memory that they need. Used by autograd.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/gathered_attention/operands.h"
#include "attention/kernels/relative_positions/gpu_terms.h"

namespace birkhoff {

// Why the kernels do not support this, regardless of where its tensors are; empty if they do.
std::string why_not_gpu_kernels(const GatheredAttention& in);
// Why the tensor-core kernels do not support a call that the plain kernels support; empty if they
// do.
std::string why_not_tensor_cores(const GatheredAttention& in);

// `in` with rows of q, k, v and tables that its kernels read: contiguous, and on tensor cores
// aligned, of a multiple of 8 columns. The same for a gradient of rows like q.
GatheredAttention with_gpu_rows(GatheredAttention in);
at::Tensor gradient_with_gpu_rows(const GatheredAttention& in, const at::Tensor& d_out_BHLD);

// The functions below take rows of this form. `params` point to all other members, which must
// outlive the launch: `inputs` are sinks in fp32, the rest is written by the kernels.
struct GatheredForward {
  GatheredParams params;
  GatheredResults results;
  DistanceTerms terms;
  std::vector<at::Tensor> inputs, scratch;
};
GatheredForward gathered_forward(const GatheredAttention& in);
// After the launch for slots, and before that of the merge.
void add_values(const GatheredForward& forward);

struct GatheredBackward {
  GatheredParams params;
  GatheredGradients gradients;  // of q, k and v
  at::Tensor d_sink_BHL;        // each query's share; undefined without a sink
  DistanceTerms terms;
  std::vector<at::Tensor> inputs, scratch;
};
// d_sum_BHL may be undefined.
GatheredBackward gathered_backward(const GatheredAttention& in, const GatheredResults& results,
                                   const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL);

// All gradients, after the launch. sum_slots(numbers, sums) is launch_sums_of_slots() for
// backward.params, between tensors.
using SumSlots = std::function<void(const at::Tensor& numbers_BHPR, const at::Tensor& sums_BHLR)>;
GatheredGradients finished_gradients(const GatheredAttention& in, GatheredBackward backward,
                                     const at::Tensor& d_out_BHLD, const SumSlots& sum_slots);

}  // namespace birkhoff
