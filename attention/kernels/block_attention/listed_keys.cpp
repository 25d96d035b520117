#include "attention/kernels/block_attention/listed_keys.h"

#include <ATen/ATen.h>

#include "attention/kernels/common/masked_softmax.h"

namespace birkhoff {
namespace {

// The layers project to [B, L, H, D]; in that order blocks can join the batch without a copy.
at::Tensor concatenate_keys(const std::vector<at::Tensor>& parts_BHNbD) {
  std::vector<at::Tensor> parts_BNbHD;
  for (const at::Tensor& part : parts_BHNbD) parts_BNbHD.push_back(part.permute({0, 2, 3, 1, 4}));
  return at::cat(parts_BNbHD, 2).permute({0, 3, 1, 2, 4});
}

// The keys at `offset` that order and the ends of the sequence leave visible. Undefined: all.
at::Tensor mask_in_order(const KeyBlocks& keys, std::int64_t offset) {
  const std::int64_t N = keys.k_BHNbD.size(2), b = keys.k_BHNbD.size(3);
  const auto options = keys.k_BHNbD.options().dtype(at::kBool);
  if (offset != 0) return shift_blocks(at::ones({1, 1, N, 1, 1}, options), 2, offset, false);
  return keys.window.causal ? at::ones({1, 1, 1, b, b}, options).tril() : at::Tensor();
}

// x itself, or the block of x that each block of queries chose.
at::Tensor chosen_blocks(const KeyBlocks& keys, const at::Tensor& x_BHNbD) {
  if (!keys.chosen_BHN.defined()) return x_BHNbD;
  const at::Tensor chosen = keys.chosen_BHN.unsqueeze(3).unsqueeze(4).expand(x_BHNbD.sizes());
  const at::Tensor weights = keys.weights_BHN.unsqueeze(3).unsqueeze(4);
  return (x_BHNbD.gather(2, chosen) * weights).masked_fill(weights == 0, 0);
}

}  // namespace

ListedKeys list_keys(const BlockAttention& in) {
  std::vector<at::Tensor> k, v, mask, bias, distance, in_place;
  bool all_visible = true, all_tied = true, biased = false;
  for (const KeyBlocks& keys : in.keys) {
    const auto& sizes = keys.k_BHNbD.sizes();
    const std::vector<std::int64_t> pairs{sizes[0], sizes[1], sizes[2], sizes[3], sizes[3]};
    const auto options = keys.k_BHNbD.options();
    const at::Tensor of_k = chosen_blocks(keys, keys.k_BHNbD),
                     of_v = chosen_blocks(keys, keys.v_BHNbD);
    for (int offset = keys.window.first_offset; offset <= keys.window.last_offset; ++offset) {
      k.push_back(shift_blocks(of_k, 2, offset, 0));
      v.push_back(shift_blocks(of_v, 2, offset, 0));
      const at::Tensor part =
          and_defined(mask_in_order(keys, offset),
                      keys.mask_BHNbb[static_cast<std::size_t>(offset - keys.window.first_offset)]);
      all_visible = all_visible && !part.defined();
      mask.push_back(part.defined() ? part : at::ones({1}, options.dtype(at::kBool)));
      mask.back() = mask.back().expand(pairs);
      if (in.relative.defined()) {
        const at::Tensor place_b = at::arange(sizes[3], options.dtype(at::kLong));
        distance.push_back(place_b + offset * sizes[3] - place_b.unsqueeze(1));
        in_place.push_back(at::full({sizes[3]}, keys.in_place, options.dtype(at::kBool)));
      }
      biased = biased || keys.bias_BHNbb.defined();
      bias.push_back(
          (keys.bias_BHNbb.defined() ? keys.bias_BHNbb : at::zeros({1}, options)).expand(pairs));
    }
    all_tied = all_tied && keys.v_BHNbD.is_same(keys.k_BHNbD);
  }
  ListedKeys listed;
  listed.k_BHNWD = k.size() == 1 ? k[0] : concatenate_keys(k);
  listed.v_BHNWD = all_tied ? listed.k_BHNWD : v.size() == 1 ? v[0] : concatenate_keys(v);
  if (!all_visible) listed.mask_BHNbW = at::cat(mask, 4);
  if (in.relative.defined()) {
    listed.distance_bW = at::cat(distance, 1);
    listed.in_place_W = at::cat(in_place, 0);
  }
  if (biased) listed.bias_BHNbW = at::cat(bias, 4);
  return listed;
}

}  // namespace birkhoff
