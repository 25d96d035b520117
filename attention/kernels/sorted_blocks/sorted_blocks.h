// What Sinkhorn attention does with block weights, wherever they come from: keys and values are
// mixed block by block with them ("sorted"), and every query attends to its sorted block and to its
// own (Tay et al. 2020, section 3). sinkhorn.h says what causality, padding and documents
// mean for it. Legend: B batch, H heads, L tokens, N blocks of b tokens, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/block_attention/block_attention.h"

namespace birkhoff {

// How the sorted block and the own block meet.
enum class Combine {
  kConcat,      // one softmax over the keys of both
  kAddOutputs,  // a softmax over each, outputs added
  kAddLogits,   // logits of aligned positions added; only sorted values are read
};

// bool [B, N, N]: pairs (destination, source) that padding and documents allow, causality apart.
// Undefined where there are neither: all.
at::Tensor open_pairs(const Blocks& blocks);

struct SortedBlocks {
  at::Tensor weights_BHNN;  // 0 where not visible; B and H may be 1
  at::Tensor visible_BNN;   // bool: pairs whose weight may be above 0; undefined: as order lets
  bool causal = false;      // blocks are mixed of earlier ones
  bool leaky = false;       // causal, but for the own block: sorted keys are masked token by token
  Combine combine = Combine::kConcat;
};

// Attention to both, without dropout; q, k and v [B, H, L, D]. v may be k itself: they are then
// mixed once. Blocks are mixed on paths up to `limit`. Differentiable, by autograd.
BlockAttention sorted_and_own_attention(const Blocks& blocks, const SortedBlocks& sorted,
                                        const at::Tensor& q_BHLD, const at::Tensor& k_BHLD,
                                        const at::Tensor& v_BHLD, Path limit);

}  // namespace birkhoff
