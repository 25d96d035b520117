#include "attention/kernels/token_blocks/token_blocks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/kernels/common/masked_softmax.h"

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

Blocks::Blocks(const at::Tensor& q_BHLD, const TokenMasks& masks, std::int64_t block, bool causal)
    : block_(block),
      num_tokens_(q_BHLD.size(2)),
      num_blocks_((num_tokens_ + block - 1) / block),
      device_(q_BHLD.device()) {
  const std::int64_t padded = num_blocks_ * block;
  // Causal queries never see later tokens, so missing tokens need no mask there.
  if (masks.key_lengths_B.defined() || (!causal && padded > num_tokens_)) {
    const auto options = q_BHLD.options().dtype(at::kLong);
    lengths_B_ = masks.key_lengths_B.defined() ? masks.key_lengths_B.clamp(0, num_tokens_)
                                               : at::full({1}, num_tokens_, options);
    valid_BNb_ =
        (at::arange(padded, options) < lengths_B_.unsqueeze(1)).unflatten(1, {num_blocks_, block});
  }
  if (masks.segments_BL.defined()) {
    // Missing tokens join the last document.
    const at::Tensor last_B1 = masks.segments_BL.narrow(1, num_tokens_ - 1, 1);
    segments_BNb_ = at::cat({masks.segments_BL, last_B1.expand({-1, padded - num_tokens_})}, 1)
                        .unflatten(1, {num_blocks_, block});
  }
}

at::Tensor Blocks::to_blocks(const at::Tensor& x, std::int64_t dim) const {
  const at::Tensor whole = pad(x, dim, 0, num_blocks_ * block_ - num_tokens_, 0);
  std::vector<std::int64_t> sizes = whole.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = num_blocks_;
  sizes.insert(sizes.begin() + dim + 1, block_);
  return whole.view(sizes);  // unflatten() costs twice as much on the host
}

at::Tensor Blocks::from_blocks(const at::Tensor& x, std::int64_t dim) const {
  const at::Tensor tokens = x.flatten(dim, dim + 1);
  // The gradient of a part is zeros and a copy of it.
  return tokens.size(dim) == num_tokens_ ? tokens : tokens.narrow(dim, 0, num_tokens_);
}

at::Tensor Blocks::mask(std::int64_t offset) const {
  at::Tensor mask_BNbb;
  if (valid_BNb_.defined()) {
    mask_BNbb = shift_blocks(valid_BNb_, 1, offset, false).unsqueeze(2);
  }
  if (segments_BNb_.defined()) {
    const at::Tensor keys_BNb = shift_blocks(segments_BNb_, 1, offset, -1);
    mask_BNbb = and_defined(mask_BNbb, segments_BNb_.unsqueeze(3) == keys_BNb.unsqueeze(2));
  }
  return mask_BNbb.defined() ? mask_BNbb.unsqueeze(1) : mask_BNbb;
}

at::Tensor new_blocks_like(const at::Tensor& x) { return new_blocks(x, x.size(2)); }

at::Tensor new_blocks(const at::Tensor& x, std::int64_t num_blocks) {
  const std::int64_t B = x.size(0), H = x.size(1), b = x.size(3), D = x.size(4);
  if (x.is_contiguous()) return at::empty({B, H, num_blocks, b, D}, x.options());
  return at::empty({B, num_blocks, b, H, D}, x.options()).permute({0, 3, 1, 2, 4});
}

at::Tensor shift_blocks(const at::Tensor& x, std::int64_t dim, std::int64_t offset,
                        const at::Scalar& fill) {
  if (offset == 0) return x;
  const std::int64_t distance = std::min(std::abs(offset), x.size(dim));
  const std::int64_t kept = x.size(dim) - distance;
  return offset > 0 ? pad(x.narrow(dim, distance, kept), dim, 0, distance, fill)
                    : pad(x.narrow(dim, 0, kept), dim, distance, 0, fill);
}

}  // namespace birkhoff
