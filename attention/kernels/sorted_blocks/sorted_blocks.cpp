// Legend: B batch, H heads, L tokens, N blocks, b tokens per block, D head dim.
#include "attention/kernels/sorted_blocks/sorted_blocks.h"

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "attention/kernels/block_mix/block_mix.h"
#include "attention/kernels/block_mix/listed_mix.h"
#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/limits.h"
#include "attention/kernels/common/masked_softmax.h"
#include "attention/kernels/sorted_blocks/existing_share.h"

namespace birkhoff {
namespace {

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

// Keys and values in blocks. v may be k itself; it then stays the same tensor.
struct KeysInBlocks {
  at::Tensor k_BHNbD, v_BHNbD;

  KeysInBlocks(const Blocks& blocks, const at::Tensor& k_BHLD, const at::Tensor& v_BHLD) {
    k_BHNbD = blocks.to_blocks(k_BHLD, 2);
    v_BHNbD = v_BHLD.is_same(k_BHLD) ? k_BHNbD : blocks.to_blocks(v_BHLD, 2);
  }
  bool tied() const { return v_BHNbD.is_same(k_BHNbD); }
  // What is mixed.
  std::vector<at::Tensor> each() const {
    return tied() ? std::vector{k_BHNbD} : std::vector{k_BHNbD, v_BHNbD};
  }
  // Replaces padding by 0.
  void clear_padding(const Blocks& blocks) {
    if (!blocks.valid_BNb().defined()) return;
    const bool tied = this->tied();
    const at::Tensor padding = blocks.valid_BNb().logical_not().unsqueeze(1).unsqueeze(4);
    k_BHNbD = k_BHNbD.masked_fill(padding, 0);
    v_BHNbD = tied ? k_BHNbD : v_BHNbD.masked_fill(padding, 0);
  }
};

// Sorted keys: sums over existing tokens, divided by their share of the weight.
KeysInBlocks divided(const KeysInBlocks& sums, const ExistingShare& share) {
  const at::Tensor divisor = share.share_BHUb.unsqueeze(4).to(sums.k_BHNbD.scalar_type());
  KeysInBlocks keys = sums;
  keys.k_BHNbD = sums.k_BHNbD / divisor;
  keys.v_BHNbD = sums.tied() ? keys.k_BHNbD : sums.v_BHNbD / divisor;
  return keys;
}

void report_copies(const at::Tensor& x, Path limit) {
  if (limit != Path::kFused || kernel_device(x) != KernelDevice::kGpu) return;
  take_path("sorting of blocks", {Path::kFused, "padding needs copies of keys and values"});
}

BlockMixes mix(const SortedBlocks& sorted, const MixPadding& padding,
               const std::vector<at::Tensor>& x_BHNbD, Path limit) {
  const at::Tensor& sources = sorted.sources_BHNm;
  if (sources.defined() && limit == Path::kFused) {
    if (few_sources_would_save(x_BHNbD)) {
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
                          limit, sorted.rounded, padding);
}

// The first n mixes. Few of them are sums of rows that are read where they lie: a matrix product
// would copy all keys and values first.
BlockMixes mix_first(const at::Tensor& weights_BHnN, const std::vector<at::Tensor>& x_BHNbD,
                     Path limit) {
  if (limit == Path::kFused && prefers_listed_mix(x_BHNbD.front(), weights_BHnN.size(2)) &&
      take_path("block mixing", {Path::kFused}) == Path::kFused) {
    const at::Tensor sources_N = at::arange(weights_BHnN.size(3));
    return mix_listed_blocks(weights_BHnN, sources_N.expand_as(weights_BHnN), x_BHNbD);
  }
  BlockMixes mixes{.y_BHNbD = {}, .x_BHNbD = x_BHNbD};
  for (const at::Tensor& x : x_BHNbD) mixes.y_BHNbD.push_back(mix_blocks(weights_BHnN, x));
  return mixes;
}

// Whether block attention reads each block's only source where it lies, so that nothing is mixed.
bool reads_sources(const SortedBlocks& in, const at::Tensor& k_BHNbD, Path limit) {
  return in.sources_BHNm.defined() && in.sources_BHNm.size(3) == 1 && limit == Path::kFused &&
         in.combine != Combine::kAddLogits && kernel_device(k_BHNbD) == KernelDevice::kCpu &&
         has_tile_type(k_BHNbD.scalar_type()) && k_BHNbD.size(4) <= kMaxTileHeadDim;
}

// The queries that see sorted keys at all, and those that see each of them.
void set_masks(const Blocks& blocks, const SortedBlocks& in, SortedKeys& sorted) {
  const std::int64_t block = blocks.block();
  sorted.queries_BHNb1 = seeing_blocks(blocks, in);
  if (blocks.segments_BNb().defined()) {
    const at::Tensor in_document_BNb =
        blocks.segments_BNb() == blocks.segments_BNb().narrow(2, 0, 1);
    sorted.queries_BHNb1 =
        and_defined(sorted.queries_BHNb1, in_document_BNb.unsqueeze(1).unsqueeze(4));
  }
  sorted.mask_BHNbb = sorted.queries_BHNb1;
  // Queries see sorted keys at positions up to their own.
  if (in.leaky) {
    sorted.mask_BHNbb = sorted.mask_BHNbb.expand({-1, -1, -1, block, block}).tril();
  }
}

// Kernels that leave padding out get weights divided by the existing share; for others keys are
// copied, with 0 at padding, and sums are divided.
SortedKeys sort_keys(const Blocks& blocks, const SortedBlocks& in, KeysInBlocks keys, Path limit) {
  const bool padded = blocks.valid_BNb().defined(),
             left_out = padded && leaves_padding_out(keys.each(), limit);
  if (!left_out) keys.clear_padding(blocks);
  const at::ScalarType dtype = keys.k_BHNbD.scalar_type();
  SortedKeys sorted;
  set_masks(blocks, in, sorted);
  std::optional<ExistingShare> share;
  MixPadding padding;
  if (padded) {
    share.emplace(blocks, in.weights_BHNN);
    sorted.mask_BHNbb = and_defined(sorted.mask_BHNbb, share->visible_BHUb.unsqueeze(3));
  }
  if (left_out) {
    padding = {blocks.lengths_B(), share->without_last_blocks(blocks, in.weights_BHNN)};
  }

  sorted.k_BHNbD = sorted.own_k_BHNbD = keys.k_BHNbD;
  sorted.v_BHNbD = sorted.own_v_BHNbD = keys.v_BHNbD;
  if (reads_sources(in, keys.k_BHNbD, limit)) {
    const auto of_heads = [&](const at::Tensor& x_BHN1) {
      return x_BHN1.squeeze(3).expand(keys.k_BHNbD.sizes().slice(0, 3));
    };
    sorted.chosen_BHN = of_heads(in.sources_BHNm);
    sorted.weights_BHN = of_heads(in.weights_BHNN.gather(3, in.sources_BHNm)).to(dtype);
    return sorted;  // a single source's share is 0 or 1
  }
  const BlockMixes mixes = mix(in, padding, keys.each(), limit);
  KeysInBlocks mixed = keys;
  mixed.k_BHNbD = mixes.y_BHNbD.front();
  mixed.v_BHNbD = mixes.y_BHNbD.back();
  sorted.own_k_BHNbD = mixes.x_BHNbD.front();
  sorted.own_v_BHNbD = mixes.x_BHNbD.back();
  if (padded) {
    if (!left_out) {
      report_copies(keys.k_BHNbD, limit);
      mixed = divided(mixed, *share);
    }
    sorted.bias_BHN1b = share->bias_BHUb(dtype).unsqueeze(3);
  }
  sorted.k_BHNbD = mixed.k_BHNbD;
  sorted.v_BHNbD = mixed.v_BHNbD;
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
  const SortedKeys sorted = sort_keys(blocks, in, KeysInBlocks(blocks, k_BHLD, v_BHLD), limit);

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

BlockAttention shared_blocks_attention(const Blocks& blocks, const SharedBlocks& in,
                                       const at::Tensor& q_BHLD, const at::Tensor& k_BHSD,
                                       const at::Tensor& v_BHSD, Path limit) {
  KeysInBlocks keys(blocks, k_BHSD, v_BHSD);
  keys.clear_padding(blocks);
  const std::int64_t n = in.weights_BHnN.size(2), b = blocks.block();
  const BlockMixes mixes = mix_first(in.weights_BHnN, keys.each(), limit);
  keys.k_BHNbD = mixes.y_BHNbD.front();
  keys.v_BHNbD = mixes.y_BHNbD.back();
  at::Tensor visible_BHnb, bias_BHnb;
  if (blocks.valid_BNb().defined()) {
    report_copies(k_BHSD, limit);
    const ExistingShare share(blocks, in.weights_BHnN);
    keys = divided(keys, share);
    visible_BHnb = share.visible_BHUb;
    bias_BHnb = share.bias_BHUb(k_BHSD.scalar_type());
  }

  // Block attention wants blocks of queries as long as those of keys. A single block of all shared
  // keys fills the kernels' tiles best; own blocks need blocks of b.
  const std::int64_t together = in.own || q_BHLD.size(2) < n * b ? 1 : n, length = together * b;
  const Blocks queries(q_BHLD, {.key_lengths_B = {}, .segments_BL = in.segments_q_BL}, length,
                       /*causal=*/true);
  const std::int64_t M = queries.num_blocks();
  BlockAttention attention{.q_BHNbD = queries.to_blocks(q_BHLD, 2), .keys = {}, .noise = {}};
  for (std::int64_t first = 0; first < n; first += together) {
    const auto of_entry = [&](const at::Tensor& x_BHnb) {  // [B, H, length, ..]
      return x_BHnb.narrow(2, first, together).flatten(2, 3);
    };
    const auto for_all_queries = [&](const at::Tensor& x_BHnbD) {
      return of_entry(x_BHnbD).unsqueeze(2).expand({-1, -1, M, -1, -1});
    };
    KeyBlocks& shared = attention.keys.emplace_back();
    shared.k_BHNbD = for_all_queries(keys.k_BHNbD);
    shared.v_BHNbD = keys.tied() ? shared.k_BHNbD : for_all_queries(keys.v_BHNbD);
    at::Tensor mask;
    if (visible_BHnb.defined()) {
      mask = of_entry(visible_BHnb).unsqueeze(2).unsqueeze(3);
      shared.bias_BHNbb = of_entry(bias_BHnb).unsqueeze(2).unsqueeze(3);
    }
    if (in.segments_q_BL.defined()) {
      // A query sees the shared blocks that begin in its document and have a source.
      const at::Tensor document_Bn =
          blocks.segments_BNb().select(2, 0).masked_fill(in.visible_BNN.any(2).logical_not(), -1);
      const at::Tensor of_keys_B1111b = document_Bn.narrow(1, first, together)
                                            .repeat_interleave(b, 1)
                                            .view({-1, 1, 1, 1, length});
      mask = and_defined(mask, queries.segments_BNb().unsqueeze(1).unsqueeze(4) == of_keys_B1111b);
    }
    shared.mask_BHNbb = {mask};
  }
  if (in.own) {
    attention.keys.push_back({.k_BHNbD = mixes.x_BHNbD.front(),
                              .v_BHNbD = mixes.x_BHNbD.back(),
                              .mask_BHNbb = {blocks.mask(0)},
                              .bias_BHNbb = {},
                              .in_place = true});
  }
  return attention;
}

}  // namespace birkhoff
