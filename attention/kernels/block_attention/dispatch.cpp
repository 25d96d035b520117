#include <algorithm>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_attention/gpu_arguments.h"
#include "attention/kernels/block_attention/paths.h"
#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/limits.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

bool fits_cpu_loop(const BlockAttention& in) {
  const at::ScalarType dtype = in.q_BHNbD.scalar_type();
  if (!has_tile_type(dtype) || in.q_BHNbD.size(4) > kMostTileHeadDim) return false;
  return std::all_of(in.keys.begin(), in.keys.end(), [&](const KeyBlocks& keys) {
    return keys.k_BHNbD.scalar_type() == dtype && keys.v_BHNbD.scalar_type() == dtype &&
           (!keys.bias_BHNbb.defined() || keys.bias_BHNbb.scalar_type() == dtype);
  });
}

}  // namespace

KeyBlocks neighbouring_keys(const Blocks& blocks, const at::Tensor& k_BHLD,
                            const at::Tensor& v_BHLD, std::int64_t look_back,
                            std::int64_t look_ahead, bool causal) {
  KeyBlocks keys;
  keys.k_BHNbD = blocks.to_blocks(k_BHLD, 2);
  keys.v_BHNbD = blocks.to_blocks(v_BHLD, 2);
  keys.window = {.first_offset = static_cast<int>(-look_back),
                 .last_offset = static_cast<int>(look_ahead),
                 .causal = causal};
  for (std::int64_t offset = -look_back; offset <= look_ahead; ++offset) {
    keys.mask_BHNbb.push_back(blocks.mask(offset));
  }
  return keys;
}

Path choose_path(const BlockAttention& in, Path limit) {
  if (limit == Path::kReference) return limit;
  if (limit == Path::kFused && (in.q_BHNbD.is_cuda()  ? kHasGpuKernels && fits_gpu_kernels(in)
                                : in.q_BHNbD.is_cpu() ? fits_cpu_loop(in)
                                                      : false)) {
    return Path::kFused;
  }
  // LibTorch's fused attention cannot use our noise and computes no gradient of a bias.
  const bool biased = std::any_of(in.keys.begin(), in.keys.end(),
                                  [](const KeyBlocks& keys) { return keys.bias_BHNbb.defined(); });
  return biased || (in.noise && in.dropout > 0) ? Path::kReference : Path::kSdpa;
}

at::Tensor attend_in_blocks(const BlockAttention& in, Path limit) {
  switch (choose_path(in, limit)) {
    case Path::kReference:
      return attend_reference(in);
    case Path::kSdpa:
      return attend_sdpa(in);
    case Path::kFused:
      return attend_fused(in);
  }
  return {};
}

}  // namespace birkhoff
