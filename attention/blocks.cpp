#include "attention/blocks.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attention/masked_softmax.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

at::Tensor pad(const at::Tensor& x, std::int64_t dim, std::int64_t before, std::int64_t after,
               const at::Scalar& fill) {
  if (before == 0 && after == 0) return x;
  // (before, after) pairs, from the last dim to `dim`.
  std::vector<std::int64_t> pads(static_cast<std::size_t>(2 * (x.dim() - dim)), 0);
  pads[pads.size() - 2] = before;
  pads[pads.size() - 1] = after;
  return at::constant_pad_nd(x, pads, fill);
}

}  // namespace

Blocks::Blocks(const AttentionInput& in, std::int64_t block, bool causal)
    : block_(block),
      num_tokens_(in.q_BHLD.size(2)),
      num_blocks_((num_tokens_ + block - 1) / block),
      causal_(causal),
      device_(in.q_BHLD.device()) {
  require(in.k_BHSD.size(2) == num_tokens_, "attention in blocks needs as many keys as queries");
  const std::int64_t padded = num_blocks_ * block;
  // Causal queries never see what lies after them, so missing tokens need no mask there.
  if (in.key_lengths_B.defined() || (!causal && padded > num_tokens_)) {
    const auto options = in.q_BHLD.options().dtype(at::kLong);
    const at::Tensor lengths_B1 = in.key_lengths_B.defined()
                                      ? in.key_lengths_B.clamp_max(num_tokens_).unsqueeze(1)
                                      : at::full({1, 1}, num_tokens_, options);
    valid_BNb_ = (at::arange(padded, options) < lengths_B1).unflatten(1, {num_blocks_, block});
  }
  if (in.segments_q_BL.defined()) {
    // Missing tokens join the last document.
    const at::Tensor last_B1 = in.segments_q_BL.narrow(1, num_tokens_ - 1, 1);
    segments_BNb_ = at::cat({in.segments_q_BL, last_B1.expand({-1, padded - num_tokens_})}, 1)
                        .unflatten(1, {num_blocks_, block});
  }
}

at::Tensor Blocks::fold(const at::Tensor& x, std::int64_t dim) const {
  return pad(x, dim, 0, num_blocks_ * block_ - num_tokens_, 0)
      .unflatten(dim, {num_blocks_, block_});
}

at::Tensor Blocks::unfold(const at::Tensor& x, std::int64_t dim) const {
  return x.flatten(dim, dim + 1).narrow(dim, 0, num_tokens_);
}

at::Tensor Blocks::legal(std::int64_t offset) const {
  at::Tensor legal = at::ones({1, num_blocks_, block_, block_}, mask_options());
  if (causal_ && offset == 0) legal = at::tril(legal);
  if (offset != 0) {
    legal = at::logical_and(
        legal, shift_blocks(at::ones({1, num_blocks_, 1, 1}, mask_options()), 1, offset, false));
  }
  if (valid_BNb_.defined()) {
    legal = at::logical_and(legal, shift_blocks(valid_BNb_, 1, offset, false).unsqueeze(2));
  }
  if (segments_BNb_.defined()) {
    const at::Tensor keys_BNb = shift_blocks(segments_BNb_, 1, offset, -1);
    legal = at::logical_and(legal, segments_BNb_.unsqueeze(3) == keys_BNb.unsqueeze(2));
  }
  return legal.unsqueeze(1);
}

at::Tensor shift_blocks(const at::Tensor& x, std::int64_t dim, std::int64_t offset,
                        const at::Scalar& fill) {
  if (offset == 0) return x;
  const std::int64_t distance = std::min(std::abs(offset), x.size(dim));
  const std::int64_t kept = x.size(dim) - distance;
  return offset > 0 ? pad(x.narrow(dim, distance, kept), dim, 0, distance, fill)
                    : pad(x.narrow(dim, 0, kept), dim, distance, 0, fill);
}

at::Tensor concatenate_keys(at::TensorList parts_BHNwD) {
  // The layers project to [B, L, H, D]: in that order blocks can join the batch without a copy.
  std::vector<at::Tensor> parts_BNwHD;
  for (const at::Tensor& part : parts_BHNwD) parts_BNwHD.push_back(part.permute({0, 2, 3, 1, 4}));
  return at::cat(parts_BNwHD, 2).permute({0, 3, 1, 2, 4});
}

at::Tensor mix_blocks(const at::Tensor& weights_BHUN, const at::Tensor& x_BHNbD) {
  return at::matmul(weights_BHUN.to(x_BHNbD.scalar_type()), x_BHNbD.flatten(3))
      .unflatten(3, {x_BHNbD.size(3), x_BHNbD.size(4)});
}

namespace {

// [B, H, N, w, x] as a batch of B N: [B N, H, w, x].
at::Tensor blocks_to_batch(const at::Tensor& x) {
  const at::Tensor x_BNHwx = x.transpose(1, 2);
  return x_BNHwx.reshape({-1, x.size(1), x.size(3), x.size(4)});
}

at::Tensor attend_fused(const BlockAttention& in) {
  const std::int64_t B = in.q_BHNbD.size(0), N = in.q_BHNbD.size(2);
  std::optional<at::Tensor> mask;
  at::Tensor seeing;
  if (in.legal_BHNbW.defined()) {
    mask = blocks_to_batch(
        additive_mask(in.legal_BHNbW, in.q_BHNbD.scalar_type()).expand({B, -1, N, -1, -1}));
    seeing = in.legal_BHNbW.any(-1, /*keepdim=*/true);
  }
  const at::Tensor out_BHNbD =
      at::scaled_dot_product_attention(blocks_to_batch(in.q_BHNbD), blocks_to_batch(in.k_BHNWD),
                                       blocks_to_batch(in.v_BHNWD), mask, 0, in.causal)
          .unflatten(0, {B, N})
          .transpose(1, 2);
  // Looking is cheap on the CPU alone: elsewhere it would wait for the device.
  if (!seeing.defined() || (seeing.is_cpu() && seeing.all().item<bool>())) return out_BHNbD;
  return out_BHNbD.masked_fill(seeing.logical_not(), 0);
}

at::Tensor attend_materialised(const BlockAttention& in) {
  at::Tensor scores_BHNbW = at::matmul(in.q_BHNbD, in.k_BHNWD.transpose(-1, -2)) *
                            (1 / std::sqrt(static_cast<double>(in.q_BHNbD.size(4))));
  if (in.bias_BHNbW.defined()) scores_BHNbW = scores_BHNbW + in.bias_BHNbW;
  at::Tensor legal = in.legal_BHNbW;
  if (in.causal && !legal.defined()) {
    legal =
        at::ones({in.q_BHNbD.size(3), in.k_BHNWD.size(3)}, in.q_BHNbD.options().dtype(at::kBool))
            .tril();
  }
  const auto in_parts = [&](const at::Tensor& x) {
    return x.defined() ? x.unflatten(-1, {in.num_softmaxes, -1}) : x;
  };
  const at::Tensor p_BHNbW =
      masked_softmax(in_parts(scores_BHNbW), in_parts(legal)).flatten(-2, -1);
  return at::matmul(drop_probabilities(p_BHNbW, in.dropout, in.noise), in.v_BHNWD);
}

}  // namespace

at::Tensor attend_in_blocks(const BlockAttention& in, bool fused) {
  // The fused kernel knows no noise of ours and gives no gradient to a bias.
  if (!fused || in.bias_BHNbW.defined() || (in.noise && in.dropout > 0)) {
    return attend_materialised(in);
  }
  if (in.num_softmaxes == 1) return attend_fused(in);
  const std::int64_t width = in.k_BHNWD.size(3) / in.num_softmaxes;
  at::Tensor out_BHNbD;
  for (std::int64_t part = 0; part < in.num_softmaxes; ++part) {
    BlockAttention one = in;
    one.num_softmaxes = 1;
    one.k_BHNWD = in.k_BHNWD.narrow(3, part * width, width);
    one.v_BHNWD = in.v_BHNWD.narrow(3, part * width, width);
    one.legal_BHNbW = in.legal_BHNbW.narrow(4, part * width, width);
    const at::Tensor part_out = attend_fused(one);
    out_BHNbD = out_BHNbD.defined() ? out_BHNbD + part_out : part_out;
  }
  return out_BHNbD;
}

}  // namespace birkhoff
