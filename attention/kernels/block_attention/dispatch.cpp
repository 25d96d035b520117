#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_attention/gpu_arguments.h"
#include "attention/kernels/block_attention/paths.h"
#include "attention/kernels/common/masked_softmax.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

std::string why_not_cpu_loop(const BlockAttention& in) {
  const at::ScalarType dtype = in.q_BHNbD.scalar_type();
  if (std::string why = why_not_tiles(dtype, in.q_BHNbD.size(4)); !why.empty()) return why;
  const bool one_dtype = std::all_of(in.keys.begin(), in.keys.end(), [&](const KeyBlocks& keys) {
    return keys.k_BHNbD.scalar_type() == dtype && keys.v_BHNbD.scalar_type() == dtype &&
           (!keys.bias_BHNbb.defined() || keys.bias_BHNbb.scalar_type() == dtype) &&
           (!keys.weights_BHN.defined() || keys.weights_BHN.scalar_type() == dtype);
  });
  return one_dtype ? "" : "keys have another dtype than queries";
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
  keys.in_place = true;
  for (std::int64_t offset = -look_back; offset <= look_ahead; ++offset) {
    keys.mask_BHNbb.push_back(blocks.mask(offset));
  }
  return keys;
}

KeyBlocks nearest_keys(const Blocks& blocks, const at::Tensor& k_BHLD, const at::Tensor& v_BHLD,
                       std::int64_t width, bool causal) {
  const std::int64_t b = blocks.block();
  // The first query of a block reaches the furthest back.
  const std::int64_t reach = std::min((width - 1 + b - 1) / b, blocks.num_blocks() - 1);
  KeyBlocks keys = neighbouring_keys(blocks, k_BHLD, v_BHLD, reach, causal ? 0 : reach, causal);
  for (int offset = keys.window.first_offset; offset <= keys.window.last_offset; ++offset) {
    const bool all_near = std::abs(offset) * b + b - 1 < width;
    if (all_near) continue;
    at::Tensor& mask = keys.mask_BHNbb[static_cast<std::size_t>(offset - keys.window.first_offset)];
    const at::Tensor place_b = at::arange(b, blocks.mask_options().dtype(at::kLong));
    const at::Tensor distance_bb = place_b.unsqueeze(1) - (place_b + offset * b);
    mask = and_defined(mask, (distance_bb.abs() < width).view({1, 1, 1, b, b}));
  }
  return keys;
}

PathChoice choose_path(const BlockAttention& in, Path limit) {
  if (limit == Path::kReference) return {limit};
  std::string why;
  if (limit == Path::kFused) {
    why = why_not_fused(
        in.q_BHNbD, [&] { return why_not_cpu_loop(in); }, [&] { return why_not_gpu_kernels(in); });
    if (why.empty()) {
      const bool on_gpu = kernel_device(in.q_BHNbD) == KernelDevice::kGpu;
      return {Path::kFused, on_gpu ? why_padded(in.q_BHNbD.size(4)) : ""};
    }
  }
  const bool plain = !in.relative.defined() && !in.sink_H.defined();
  // LibTorch's fused attention cannot use our noise and computes no gradient of a bias.
  const bool biased = std::any_of(in.keys.begin(), in.keys.end(),
                                  [](const KeyBlocks& keys) { return keys.bias_BHNbb.defined(); });
  return {biased || !plain || (in.noise && in.dropout > 0) ? Path::kReference : Path::kSdpa,
          std::move(why)};
}

at::Tensor attend_in_blocks(const BlockAttention& in, Path limit) {
  check_relative_positions(in.relative, in.q_BHNbD, in.q_BHNbD.size(1));
  require(!in.sink_H.defined() || (in.sink_H.dim() == 1 && in.sink_H.size(0) == in.q_BHNbD.size(1)),
          "block attention: sinks must be [H]");
  switch (take_path("block attention", choose_path(in, limit))) {
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
