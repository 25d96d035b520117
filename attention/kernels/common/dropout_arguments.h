// The arguments of dropout in GPU kernels, made from a noise key.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "attention/kernels/common/gpu_dropout.h"
#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {

// Attention dropout at rate p for queries q [B, ..]; none without noise. The key's tensors must
// outlive the launch. Error(kInternal) unless they are on the device of q, with an id for each
// sample.
inline DropoutParams dropout_params(float p, const std::optional<NoiseKey>& noise,
                                    const at::Tensor& q) {
  if (!noise || p == 0) return {};
  require(noise->step.device() == q.device() && noise->sample_ids_B.device() == q.device() &&
              noise->sample_ids_B.is_contiguous() && noise->sample_ids_B.size(0) == q.size(0),
          "attention dropout: noise needs a step and one sample id per row, on the device of q");
  return {.p = p,
          .scale = 1 / (1 - p),
          .seed = noise->seed,
          .step = noise->step.const_data_ptr<std::int64_t>(),
          .layer = noise->layer,
          .purpose = static_cast<std::uint32_t>(NoisePurpose::kAttentionDropout),
          .sample_ids = noise->sample_ids_B.const_data_ptr<std::int64_t>()};
}

}  // namespace birkhoff
