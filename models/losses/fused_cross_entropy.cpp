#include "models/losses/fused_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log_softmax.h>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "models/losses/gpu_cross_entropy_params.h"

namespace birkhoff {
namespace {

RowLosses launch(at::Tensor& logits_NV, const at::Tensor& targets_N, const at::Tensor& mask_N,
                 double label_smoothing) {
  const at::Tensor nats_N = at::empty({logits_NV.size(0)}, logits_NV.options().dtype(at::kFloat));
  const at::Tensor losses_N = label_smoothing > 0 ? at::empty_like(nats_N) : nats_N;
  const std::int64_t row_bytes =
      logits_NV.size(1) * static_cast<std::int64_t>(logits_NV.itemsize());
  if constexpr (kHasGpuKernels) {
    launch_fused_cross_entropy({.logits = logits_NV.mutable_data_ptr(),
                                .dtype = kernel_dtype(logits_NV),
                                .targets = targets_N.const_data_ptr<std::int64_t>(),
                                .mask = mask_N.const_data_ptr<std::uint8_t>(),
                                .nats = nats_N.mutable_data_ptr<float>(),
                                .losses = losses_N.mutable_data_ptr<float>(),
                                .label_smoothing = static_cast<float>(label_smoothing),
                                .rows = logits_NV.size(0),
                                .vocabulary = logits_NV.size(1),
                                .vectors = fits_vectors(logits_NV, row_bytes)},
                               current_stream(logits_NV));
  }
  return {nats_N, losses_N};
}

}  // namespace

RowLosses fused_cross_entropy_(at::Tensor logits_NV, const at::Tensor& targets_N,
                               const at::Tensor& mask_N, double label_smoothing) {
  require(logits_NV.dim() == 2 && logits_NV.is_contiguous() && logits_NV.size(1) > 0 &&
              logits_NV.size(1) < std::int64_t{1} << 30,
          "fused_cross_entropy: logits must be [N, V] and contiguous, V below 2^30");
  require(targets_N.scalar_type() == at::kLong && targets_N.is_contiguous() &&
              targets_N.numel() == logits_NV.size(0) && mask_N.scalar_type() == at::kByte &&
              mask_N.is_contiguous() && mask_N.numel() == logits_NV.size(0),
          "fused_cross_entropy: targets must be int64 [N], the mask u8 [N]");
  require(targets_N.device() == logits_NV.device() && mask_N.device() == logits_NV.device(),
          "fused_cross_entropy: tensors must be on one device");
  if (kHasGpuKernels && logits_NV.is_cuda() && logits_NV.scalar_type() != at::kDouble) {
    return launch(logits_NV, targets_N, mask_N, label_smoothing);
  }
  return reference_cross_entropy_(logits_NV, targets_N, mask_N, label_smoothing);
}

void scale_gradients_(at::Tensor d_NV, const at::Tensor& factor) {
  require(factor.numel() == 1 && factor.device() == d_NV.device() && d_NV.is_contiguous(),
          "scale_gradients: the factor must be a scalar on the device of contiguous gradients");
  if (kHasGpuKernels && d_NV.is_cuda() && d_NV.scalar_type() != at::kDouble) {
    require(factor.scalar_type() == at::kFloat, "scale_gradients: the factor must be fp32");
    if constexpr (kHasGpuKernels) {
      launch_scale({.x = d_NV.mutable_data_ptr(),
                    .dtype = kernel_dtype(d_NV),
                    .factor = factor.const_data_ptr<float>(),
                    .count = d_NV.numel(),
                    .vectors = fits_vectors(d_NV, static_cast<std::int64_t>(d_NV.nbytes()))},
                   current_stream(d_NV));
    }
    return;
  }
  d_NV.mul_(factor);
}

RowLosses reference_cross_entropy_(at::Tensor logits_NV, const at::Tensor& targets_N,
                                   const at::Tensor& mask_N, double label_smoothing) {
  const at::ScalarType precision =
      logits_NV.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor ignored_N = mask_N.eq(0);
  const at::Tensor targets_N1 = targets_N.masked_fill(ignored_N, 0).unsqueeze(1);
  at::Tensor log_probabilities_NV = at::log_softmax(logits_NV, /*dim=*/-1, precision);
  const at::Tensor nats_N =
      -log_probabilities_NV.gather(1, targets_N1).squeeze(1).masked_fill(ignored_N, 0);
  at::Tensor losses_N = nats_N;
  if (label_smoothing > 0) {
    losses_N = (1 - label_smoothing) * nats_N -
               label_smoothing * log_probabilities_NV.mean(1).masked_fill(ignored_N, 0);
  }
  const at::Tensor gradients_NV = log_probabilities_NV.exp_();  // in their memory
  if (label_smoothing > 0) {
    gradients_NV.sub_(label_smoothing / static_cast<double>(logits_NV.size(1)));
  }
  gradients_NV.scatter_add_(1, targets_N1, at::full_like(nats_N, label_smoothing - 1).unsqueeze(1));
  logits_NV.copy_(gradients_NV.masked_fill_(ignored_N.unsqueeze(1), 0));
  return {nats_N, losses_N};
}

}  // namespace birkhoff
