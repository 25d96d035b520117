// The part of Sinkhorn attention that uses block weights, whatever their source. The weights mix
// keys and values block by block ("sorted"), and every query attends to its sorted block and to its
// own (Tay et al. 2020, section 3). attention/mechanisms/sinkhorn/sinkhorn.h defines causality,
// padding and documents here. Legend: B batch, H heads, L tokens, N blocks of b tokens, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/block_attention/block_attention.h"

namespace birkhoff {

// The combination of the sorted block and the own block.
enum class Combine {
  kConcat,      // one softmax over the keys of both blocks
  kAddOutputs,  // one softmax over each block, outputs added
  kAddLogits,   // logits of aligned positions added; only sorted values are read
};

// bool [B, N, N]: pairs (destination, source) that padding and documents leave visible, regardless
// of causality. Undefined without padding and documents: all pairs.
at::Tensor open_pairs(const Blocks& blocks);

struct SortedBlocks {
  at::Tensor weights_BHNN;  // 0 where not visible; B and H may be 1
  at::Tensor rounded{};     // of mix_lower_blocks(), may be undefined
  // int64: the sources whose weights may differ from 0, m for each destination, sizes of the
  // weights otherwise. Undefined: all. With few sources, blocks are gathered instead of multiplied;
  // a single one is read where it lies (on the CPU, except with kAddLogits).
  at::Tensor sources_BHNm{};
  at::Tensor visible_BNN;  // bool: pairs whose weight may be above 0; undefined: order decides
  bool causal = false;     // blocks are mixed from earlier ones
  bool leaky = false;      // causal, own block included: sorted keys are masked token by token
  Combine combine = Combine::kConcat;
};

// The block attention to both, without dropout; q, k and v [B, H, L, D]. v may be k itself: they
// are then mixed only once. Mixing uses paths up to `limit`. Differentiable by autograd.
BlockAttention sorted_and_own_attention(const Blocks& blocks, const SortedBlocks& sorted,
                                        const at::Tensor& q_BHLD, const at::Tensor& k_BHLD,
                                        const at::Tensor& v_BHLD, Path limit);

// The first sorted blocks, which all queries see (SortCut, Tay et al. 2020, section 3.3).
struct SharedBlocks {
  at::Tensor weights_BHnN;     // of n sorted blocks; B and H may be 1
  at::Tensor visible_BNN{};    // open_pairs() of the keys; defined with documents
  at::Tensor segments_q_BL{};  // documents of queries; undefined: one document
  bool own = false;            // queries, of the same sequence, also see their own block
};

// The attention of all queries, q [B, H, L, D], to these blocks of k and v [B, H, S, D], in one
// softmax and without dropout. The result has queries in blocks of a length that suits kernels; the
// last one may be padded. v may be k itself. Differentiable by autograd.
BlockAttention shared_blocks_attention(const Blocks& blocks, const SharedBlocks& shared,
                                       const at::Tensor& q_BHLD, const at::Tensor& k_BHSD,
                                       const at::Tensor& v_BHSD, Path limit);

}  // namespace birkhoff
