#include "attention/blocks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attention/fused_block_attention.h"
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
  at::Tensor legal_BNbb;
  if (valid_BNb_.defined()) {
    legal_BNbb = shift_blocks(valid_BNb_, 1, offset, false).unsqueeze(2);
  }
  if (segments_BNb_.defined()) {
    const at::Tensor keys_BNb = shift_blocks(segments_BNb_, 1, offset, -1);
    legal_BNbb = and_defined(legal_BNbb, segments_BNb_.unsqueeze(3) == keys_BNb.unsqueeze(2));
  }
  return legal_BNbb.defined() ? legal_BNbb.unsqueeze(1) : legal_BNbb;
}

at::Tensor new_blocks_like(const at::Tensor& x) {
  if (x.is_contiguous()) return at::empty(x.sizes(), x.options());
  return at::empty({x.size(0), x.size(2), x.size(3), x.size(1), x.size(4)}, x.options())
      .permute({0, 3, 1, 2, 4});
}

at::Tensor shift_blocks(const at::Tensor& x, std::int64_t dim, std::int64_t offset,
                        const at::Scalar& fill) {
  if (offset == 0) return x;
  const std::int64_t distance = std::min(std::abs(offset), x.size(dim));
  const std::int64_t kept = x.size(dim) - distance;
  return offset > 0 ? pad(x.narrow(dim, distance, kept), dim, 0, distance, fill)
                    : pad(x.narrow(dim, 0, kept), dim, distance, 0, fill);
}

at::Tensor mix_blocks(const at::Tensor& weights_BHUN, const at::Tensor& x_BHNbD) {
  return at::matmul(weights_BHUN.to(x_BHNbD.scalar_type()), x_BHNbD.flatten(3))
      .unflatten(3, {x_BHNbD.size(3), x_BHNbD.size(4)});
}

KeyBlocks neighbouring_keys(const Blocks& blocks, const at::Tensor& k_BHLD,
                            const at::Tensor& v_BHLD, std::int64_t look_back,
                            std::int64_t look_ahead, bool causal) {
  KeyBlocks keys;
  keys.k_BHNbD = blocks.fold(k_BHLD, 2);
  keys.v_BHNbD = blocks.fold(v_BHLD, 2);
  keys.first_offset = -look_back;
  keys.last_offset = look_ahead;
  keys.causal = causal;
  for (std::int64_t offset = -look_back; offset <= look_ahead; ++offset) {
    keys.legal_BHNbb.push_back(blocks.legal(offset));
  }
  return keys;
}

namespace {

// [B, H, N, w, x] as a batch of B N: [B N, H, w, x].
at::Tensor blocks_to_batch(const at::Tensor& x) {
  const at::Tensor x_BNHwx = x.transpose(1, 2);
  return x_BNHwx.reshape({-1, x.size(1), x.size(3), x.size(4)});
}

// The layers project to [B, L, H, D]: in that order blocks can join the batch without a copy.
at::Tensor concatenate_keys(const std::vector<at::Tensor>& parts_BHNbD) {
  std::vector<at::Tensor> parts_BNbHD;
  for (const at::Tensor& part : parts_BHNbD) parts_BNbHD.push_back(part.permute({0, 2, 3, 1, 4}));
  return at::cat(parts_BNbHD, 2).permute({0, 3, 1, 2, 4});
}

// The keys of each block side by side, W in all.
struct ListedKeys {
  at::Tensor k_BHNWD, v_BHNWD;
  at::Tensor legal_BHNbW, bias_BHNbW;  // undefined: all, none
};

// Which keys order and the ends of the sequence let queries see at `offset`. Undefined: all.
at::Tensor legal_in_order(const KeyBlocks& keys, std::int64_t offset) {
  const std::int64_t N = keys.k_BHNbD.size(2), b = keys.k_BHNbD.size(3);
  const auto options = keys.k_BHNbD.options().dtype(at::kBool);
  if (offset != 0) return shift_blocks(at::ones({1, 1, N, 1, 1}, options), 2, offset, false);
  return keys.causal ? at::ones({1, 1, 1, b, b}, options).tril() : at::Tensor();
}

ListedKeys list_keys(const BlockAttention& in) {
  std::vector<at::Tensor> k, v, legal, bias;
  bool all_legal = true, all_tied = true, biased = false;
  for (const KeyBlocks& keys : in.keys) {
    const auto& sizes = keys.k_BHNbD.sizes();
    const std::vector<std::int64_t> pairs{sizes[0], sizes[1], sizes[2], sizes[3], sizes[3]};
    const auto options = keys.k_BHNbD.options();
    for (std::int64_t offset = keys.first_offset; offset <= keys.last_offset; ++offset) {
      k.push_back(shift_blocks(keys.k_BHNbD, 2, offset, 0));
      v.push_back(shift_blocks(keys.v_BHNbD, 2, offset, 0));
      const at::Tensor part =
          and_defined(legal_in_order(keys, offset),
                      keys.legal_BHNbb[static_cast<std::size_t>(offset - keys.first_offset)]);
      all_legal = all_legal && !part.defined();
      legal.push_back(part.defined() ? part : at::ones({1}, options.dtype(at::kBool)));
      legal.back() = legal.back().expand(pairs);
      biased = biased || keys.bias_BHNbb.defined();
      bias.push_back(
          (keys.bias_BHNbb.defined() ? keys.bias_BHNbb : at::zeros({1}, options)).expand(pairs));
    }
    all_tied = all_tied && keys.v_BHNbD.is_same(keys.k_BHNbD);
  }
  ListedKeys listed;
  listed.k_BHNWD = k.size() == 1 ? k[0] : concatenate_keys(k);
  listed.v_BHNWD = all_tied ? listed.k_BHNWD : v.size() == 1 ? v[0] : concatenate_keys(v);
  if (!all_legal) listed.legal_BHNbW = at::cat(legal, 4);
  if (biased) listed.bias_BHNbW = at::cat(bias, 4);
  return listed;
}

at::Tensor attend_composed(const BlockAttention& in) {
  const std::int64_t B = in.q_BHNbD.size(0), N = in.q_BHNbD.size(2);
  const KeyBlocks& first = in.keys[0];
  const bool own_past_alone = in.keys.size() == 1 && first.causal && first.first_offset == 0 &&
                              first.last_offset == 0 && !first.legal_BHNbb[0].defined();
  ListedKeys keys;
  if (own_past_alone) {
    keys = {first.k_BHNbD, first.v_BHNbD, {}, {}};
  } else {
    keys = list_keys(in);
  }
  std::optional<at::Tensor> mask;
  at::Tensor seeing;
  if (keys.legal_BHNbW.defined()) {
    mask = blocks_to_batch(additive_mask(keys.legal_BHNbW, in.q_BHNbD.scalar_type()));
    seeing = keys.legal_BHNbW.any(-1, /*keepdim=*/true);
  }
  const at::Tensor out_BHNbD =
      library_attention(blocks_to_batch(in.q_BHNbD), blocks_to_batch(keys.k_BHNWD),
                        blocks_to_batch(keys.v_BHNWD), mask, own_past_alone)
          .unflatten(0, {B, N})
          .transpose(1, 2);
  // Looking is cheap on the CPU alone: elsewhere it would wait for the device.
  if (!seeing.defined() || (seeing.is_cpu() && seeing.all().item<bool>())) return out_BHNbD;
  return out_BHNbD.masked_fill(seeing.logical_not(), 0);
}

at::Tensor attend_materialised(const BlockAttention& in) {
  const ListedKeys keys = list_keys(in);
  at::Tensor scores_BHNbW = at::matmul(in.q_BHNbD, keys.k_BHNWD.transpose(-1, -2)) *
                            (1 / std::sqrt(static_cast<double>(in.q_BHNbD.size(4))));
  if (keys.bias_BHNbW.defined()) scores_BHNbW = scores_BHNbW + keys.bias_BHNbW;
  const std::int64_t num_softmaxes = in.one_softmax ? 1 : static_cast<std::int64_t>(in.keys.size());
  const auto in_parts = [&](const at::Tensor& x) {
    return x.defined() ? x.unflatten(-1, {num_softmaxes, -1}) : x;
  };
  const at::Tensor p_BHNbW =
      masked_softmax(in_parts(scores_BHNbW), in_parts(keys.legal_BHNbW)).flatten(-2, -1);
  return at::matmul(drop_probabilities(p_BHNbW, in.dropout, in.noise), keys.v_BHNWD);
}

}  // namespace

BlockPath fastest_path(const BlockAttention& in, BlockPath limit) {
  if (limit == BlockPath::kReference) return limit;
  if (limit == BlockPath::kFused && fits_fused(in)) return BlockPath::kFused;
  // LibTorch's fused attention knows no noise of ours and gives no gradient to a bias.
  const bool biased = std::any_of(in.keys.begin(), in.keys.end(),
                                  [](const KeyBlocks& keys) { return keys.bias_BHNbb.defined(); });
  return biased || (in.noise && in.dropout > 0) ? BlockPath::kReference : BlockPath::kComposed;
}

at::Tensor attend_in_blocks(const BlockAttention& in, BlockPath path) {
  if (path == BlockPath::kReference) return attend_materialised(in);
  if (path == BlockPath::kFused) return attend_fused(in);
  if (in.one_softmax) return attend_composed(in);
  at::Tensor out_BHNbD;
  for (const KeyBlocks& keys : in.keys) {
    BlockAttention one = in;
    one.keys = {keys};
    const at::Tensor part = attend_composed(one);
    out_BHNbD = out_BHNbD.defined() ? out_BHNbD + part : part;
  }
  return out_BHNbD;
}

}  // namespace birkhoff
