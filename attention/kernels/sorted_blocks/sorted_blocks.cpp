// Legend: B batch, H heads, L tokens, N blocks, b tokens per block, D head dim.
#include "attention/kernels/sorted_blocks/sorted_blocks.h"

#include <ATen/ATen.h>

#include <vector>

#include "attention/kernels/block_mix/block_mix.h"
#include "attention/kernels/block_mix/listed_mix.h"
#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/limits.h"
#include "attention/kernels/common/masked_softmax.h"

namespace birkhoff {
namespace {

constexpr double kMinShare = 1e-20;  // least share of a sorted key's weight on existing tokens

// The sorted blocks that each block's queries attend to.
struct SortedKeys {
  at::Tensor k_BHNbD, v_BHNbD;
  at::Tensor chosen_BHN, weights_BHN;   // see KeyBlocks; undefined: k and v are mixes
  at::Tensor own_k_BHNbD, own_v_BHNbD;  // the sort's input; other uses read it from here
  // bool: queries that see their block's sorted keys at all, and those that see each sorted key.
  // Undefined: all.
  at::Tensor queries_BHNb1, mask_BHNbb;
  at::Tensor bias_BHN1b;  // log share of existing tokens; undefined: all exist
};

// queries_BHNb1 before documents are considered token by token. Without visible_BNN only order
// decides: the first block has no earlier block.
at::Tensor seeing_blocks(const Blocks& blocks, const SortedBlocks& in) {
  if (in.visible_BNN.defined()) {
    return in.visible_BNN.any(2).unsqueeze(1).unsqueeze(3).unsqueeze(4);
  }
  // Adding logits takes the queries that do not see.
  if (!in.causal && in.combine != Combine::kAddLogits) return {};
  const at::Tensor sees = at::ones({1, 1, blocks.num_blocks(), 1, 1}, blocks.mask_options());
  if (in.causal && !in.leaky) sees.select(2, 0).fill_(false);
  return sees;
}

BlockMixes mix(const SortedBlocks& sorted, const std::vector<at::Tensor>& x_BHNbD, Path limit) {
  const at::Tensor& sources = sorted.sources_BHNm;
  if (sources.defined() && limit == Path::kFused) {
    if (kernel_device(x_BHNbD.front()) == KernelDevice::kGpu) {
      take_path("mixing of few sources",
                {Path::kFused, "those of GPUs multiply every block, most of them by 0"});
    } else if (prefers_listed_mix(x_BHNbD.front(), sources.size(3)) &&
               take_path("block mixing", {Path::kFused}) == Path::kFused) {
      return mix_listed_blocks(sorted.weights_BHNN.gather(3, sources), sources, x_BHNbD);
    }
  }
  const std::int64_t all = x_BHNbD.front().size(2) - 1;
  return mix_lower_blocks(sorted.weights_BHNN, x_BHNbD,
                          !sorted.causal ? all
                          : sorted.leaky ? 0
                                         : -1,
                          limit, sorted.rounded);
}

// Whether block attention reads each block's only source where it lies, so that nothing is mixed.
bool reads_sources(const SortedBlocks& in, const at::Tensor& k_BHNbD, Path limit) {
  return in.sources_BHNm.defined() && in.sources_BHNm.size(3) == 1 && limit == Path::kFused &&
         in.combine != Combine::kAddLogits && kernel_device(k_BHNbD) == KernelDevice::kCpu &&
         has_tile_type(k_BHNbD.scalar_type()) && k_BHNbD.size(4) <= kMaxTileHeadDim;
}

// v_BHNbD may be k_BHNbD itself; then the sorted ones are the same tensor, too.
SortedKeys sort_keys(const Blocks& blocks, const SortedBlocks& in, const at::Tensor& k_BHNbD,
                     const at::Tensor& v_BHNbD, Path limit) {
  const bool tied = v_BHNbD.is_same(k_BHNbD);
  SortedKeys sorted;
  sorted.k_BHNbD = sorted.own_k_BHNbD = k_BHNbD;
  sorted.v_BHNbD = sorted.own_v_BHNbD = v_BHNbD;
  if (reads_sources(in, k_BHNbD, limit)) {
    const auto of_heads = [&](const at::Tensor& x_BHN1) {
      return x_BHN1.squeeze(3).expand(k_BHNbD.sizes().slice(0, 3));
    };
    sorted.chosen_BHN = of_heads(in.sources_BHNm);
    sorted.weights_BHN =
        of_heads(in.weights_BHNN.gather(3, in.sources_BHNm)).to(k_BHNbD.scalar_type());
  } else {
    std::vector<at::Tensor> keys_BHNbD{k_BHNbD};
    if (!tied) keys_BHNbD.push_back(v_BHNbD);
    const BlockMixes mixes = mix(in, keys_BHNbD, limit);
    sorted.k_BHNbD = mixes.y_BHNbD.front();
    sorted.v_BHNbD = mixes.y_BHNbD.back();
    sorted.own_k_BHNbD = mixes.x_BHNbD.front();
    sorted.own_v_BHNbD = mixes.x_BHNbD.back();
  }

  const std::int64_t block = k_BHNbD.size(3);
  sorted.queries_BHNb1 = seeing_blocks(blocks, in);
  if (blocks.segments_BNb().defined()) {
    const at::Tensor in_document_BNb =
        blocks.segments_BNb() == blocks.segments_BNb().narrow(2, 0, 1);
    sorted.queries_BHNb1 =
        and_defined(sorted.queries_BHNb1, in_document_BNb.unsqueeze(1).unsqueeze(4));
  }
  if (sorted.queries_BHNb1.defined()) {
    sorted.mask_BHNbb = sorted.queries_BHNb1.expand({-1, -1, -1, block, block});
  }
  // Queries see sorted keys at positions up to their own.
  if (in.leaky) sorted.mask_BHNbb = sorted.mask_BHNbb.tril();

  if (blocks.valid_BNb().defined()) {
    if (limit == Path::kFused && kernel_device(k_BHNbD) == KernelDevice::kGpu) {
      take_path("sorting of blocks", {Path::kFused, "padding needs copies of keys and values"});
    }
    const at::Tensor& weights_BHNN = in.weights_BHNN;
    const at::Tensor valid_B1Nb = blocks.valid_BNb().unsqueeze(1).to(weights_BHNN.scalar_type());
    const at::Tensor total_BHN1 = weights_BHNN.sum(3, /*keepdim=*/true);
    const at::Tensor share_BHNb =
        at::matmul(weights_BHNN, valid_B1Nb) / total_BHN1.masked_fill(total_BHN1 == 0, 1);
    const at::Tensor hidden_BHNb = share_BHNb <= kMinShare;  // a NaN share stays visible
    sorted.mask_BHNbb = and_defined(sorted.mask_BHNbb, hidden_BHNb.logical_not().unsqueeze(3));
    if (sorted.chosen_BHN.defined()) return sorted;  // a single source's share is 0 or 1
    const at::Tensor divisor_BHNb = share_BHNb.clamp_min(kMinShare);
    const at::Tensor divisor = divisor_BHNb.unsqueeze(4).to(k_BHNbD.scalar_type());
    sorted.k_BHNbD = sorted.k_BHNbD / divisor;
    sorted.v_BHNbD = tied ? sorted.k_BHNbD : sorted.v_BHNbD / divisor;
    sorted.bias_BHN1b = divisor_BHNb.log().unsqueeze(3).to(k_BHNbD.scalar_type());
  }
  return sorted;
}

}  // namespace

at::Tensor open_pairs(const Blocks& blocks) {
  at::Tensor open_BNN;
  if (blocks.valid_BNb().defined()) {
    const at::Tensor exists_BN = blocks.valid_BNb().select(2, 0);  // padding comes last
    open_BNN = at::logical_and(exists_BN.unsqueeze(2), exists_BN.unsqueeze(1));
  }
  if (blocks.segments_BNb().defined()) {
    const at::Tensor& segments_BNb = blocks.segments_BNb();
    const at::Tensor first_BN1 = segments_BNb.narrow(2, 0, 1);
    at::Tensor same_BNb = segments_BNb == first_BN1;
    if (blocks.valid_BNb().defined()) {
      same_BNb = at::logical_or(same_BNb, blocks.valid_BNb().logical_not());
    }
    const at::Tensor whole_B1N = same_BNb.all(2).unsqueeze(1);
    open_BNN =
        and_defined(open_BNN, at::logical_and(whole_B1N, first_BN1 == first_BN1.transpose(1, 2)));
  }
  return open_BNN;
}

BlockAttention sorted_and_own_attention(const Blocks& blocks, const SortedBlocks& in,
                                        const at::Tensor& q_BHLD, const at::Tensor& k_BHLD,
                                        const at::Tensor& v_BHLD, Path limit) {
  const bool tied = v_BHLD.is_same(k_BHLD);
  at::Tensor k_BHNbD = blocks.to_blocks(k_BHLD, 2);
  at::Tensor v_BHNbD = tied ? k_BHNbD : blocks.to_blocks(v_BHLD, 2);
  if (blocks.valid_BNb().defined()) {
    const at::Tensor padding = blocks.valid_BNb().logical_not().unsqueeze(1).unsqueeze(4);
    k_BHNbD = k_BHNbD.masked_fill(padding, 0);
    v_BHNbD = tied ? k_BHNbD : v_BHNbD.masked_fill(padding, 0);
  }
  const SortedKeys sorted = sort_keys(blocks, in, k_BHNbD, v_BHNbD, limit);

  KeyBlocks sorted_keys{.k_BHNbD = sorted.k_BHNbD,
                        .v_BHNbD = sorted.v_BHNbD,
                        .mask_BHNbb = {sorted.mask_BHNbb},
                        .bias_BHNbb = sorted.bias_BHN1b,
                        .chosen_BHN = sorted.chosen_BHN,
                        .weights_BHN = sorted.weights_BHN};
  KeyBlocks own_keys{.k_BHNbD = sorted.own_k_BHNbD,
                     .v_BHNbD = sorted.own_v_BHNbD,
                     .window = {.causal = in.causal},
                     .mask_BHNbb = {blocks.mask(0)},
                     .bias_BHNbb = {},
                     .in_place = true};
  if (in.combine == Combine::kAddLogits) {
    sorted_keys.k_BHNbD =
        sorted.k_BHNbD + sorted.own_k_BHNbD;  // q (k_s + k) is the sum of both logits
    sorted_keys.window.causal = in.causal;
    sorted_keys.mask_BHNbb = {and_defined(sorted.mask_BHNbb, blocks.mask(0))};
    own_keys.mask_BHNbb = {and_defined(blocks.mask(0), sorted.queries_BHNb1.logical_not())};
  }
  return {.q_BHNbD = blocks.to_blocks(q_BHLD, 2),
          .keys = {sorted_keys, own_keys},
          .one_softmax = in.combine != Combine::kAddOutputs,
          .noise = {}};
}

}  // namespace birkhoff
