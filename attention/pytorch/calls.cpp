#include "attention/pytorch/calls.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_attention/paths.h"
#include "attention/kernels/sinkhorn/sinkhorn.h"
#include "attention/kernels/sorted_blocks/sorted_blocks.h"
#include "attention/pytorch/arguments.h"
#include "attention/pytorch/differentiate.h"

namespace birkhoff::ops {
namespace {

constexpr double kBarred = -std::numeric_limits<double>::infinity();

// The number of tokens in a block of q [B, H, L, D]. A sequence that is shorter than the block is
// one block of its own length.
std::int64_t block_within(const at::Tensor& q, std::int64_t block) {
  return block == kWholeSequence ? q.size(2) : std::min(block, q.size(2));
}

Blocks blocks_of(const at::Tensor& q, std::int64_t block, bool causal,
                 const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_masks(q, key_lengths, segments);
  return Blocks(q,
                {.key_lengths_B = key_lengths.value_or(at::Tensor()),
                 .segments_BL = segments.value_or(at::Tensor())},
                block_within(q, block), causal);
}

// A checked call.
class Call {
 public:
  Call(at::TensorList inputs, const AttentionInBlocks& call)
      : blocks_(blocks_of(checked(inputs, call), call.block, call.causal, call.key_lengths,
                          call.segments)),
        // At most as many blocks as exist.
        look_back_(std::min(call.look_back, blocks_.num_blocks() - 1)),
        look_ahead_(std::min(call.look_ahead, blocks_.num_blocks() - 1)),
        causal_(call.causal),
        sorts_(inputs.size() > kWeights),
        combine_(combine_named(call.combine)),
        dropout_(static_cast<float>(call.dropout)),
        noise_(noise_of(call.dropout, call.seed, inputs[kQueries])) {
    const at::Tensor& q = inputs[kQueries];
    if (sorts_) {
      const std::int64_t N = blocks_.num_blocks();
      const std::vector<std::int64_t> sizes{q.size(0), inputs[kKeys].size(1), N, N};
      TORCH_CHECK_VALUE(inputs[kWeights].sizes() == sizes,
                        "birkhoff: block weights (or their scores) must be ",
                        at::IntArrayRef(sizes), ", not ", inputs[kWeights].sizes());
    }
  }

  const Blocks& blocks() const { return blocks_; }
  bool is_local() const { return !sorts_; }

  // Differentiable in the inputs.
  BlockAttention attention(at::TensorList inputs) const {
    BlockAttention attention = sorts_ ? sorted(inputs) : local(inputs);
    const GivenTerms terms = terms_of(inputs, causal_);
    attention.relative = terms.relative;
    attention.sink_H = terms.sink_H;
    attention.dropout = dropout_;
    attention.noise = noise_;
    return attention;
  }

 private:
  static const at::Tensor& checked(at::TensorList inputs, const AttentionInBlocks& call) {
    check_options(inputs, call);
    check_sizes_of_inputs(inputs, call.causal);
    TORCH_CHECK_VALUE(!is_none(inputs[kKeys]), "birkhoff: k must be [B, H, L, D], not none");
    return inputs[kQueries];
  }

  BlockAttention local(at::TensorList inputs) const {
    return {.q_BHNbD = blocks_.to_blocks(inputs[kQueries], 2),
            .keys = {neighbouring_keys(blocks_, inputs[kKeys], inputs[kValues], look_back_,
                                       look_ahead_, causal_)},
            .noise = {}};
  }

  BlockAttention sorted(at::TensorList inputs) const {
    at::Tensor weights_BHNN = causal_ ? inputs[kWeights].tril(-1) : inputs[kWeights];
    at::Tensor visible_BNN = open_pairs(blocks_);
    if (visible_BNN.defined()) {
      if (causal_) visible_BNN = visible_BNN.tril(-1);
      weights_BHNN = weights_BHNN.masked_fill(visible_BNN.logical_not().unsqueeze(1), 0);
    }
    return sorted_and_own_attention(blocks_,
                                    {.weights_BHNN = weights_BHNN,
                                     .visible_BNN = visible_BNN,
                                     .causal = causal_,
                                     .combine = combine_},
                                    inputs[kQueries], inputs[kKeys], inputs[kValues], Path::kFused);
  }

  Blocks blocks_;
  std::int64_t look_back_, look_ahead_;
  bool causal_, sorts_;
  Combine combine_;
  float dropout_;
  std::optional<NoiseKey> noise_;
};

// Whether the backward pass starts from the results of the forward pass.
bool has_two_passes(const BlockAttention& attention) {
  return choose_path(attention, Path::kFused) == Path::kFused && attention.one_softmax;
}

// Returns the scores with -inf where a form reads none. Prefix masks destinations without a source,
// which do not take part in any other row's balance either; the other causal forms mask all but
// earlier sources.
at::Tensor masked(const at::Tensor& scores, Form form) {
  if (form == Form::kFull) return scores;
  const std::int64_t N = scores.size(-1);
  at::Tensor read = at::ones({N, N}, scores.options().dtype(at::kBool)).tril(-1);
  if (form == Form::kPrefix) {
    read = at::logical_and(scores != kBarred, read).any(-1, /*keepdim=*/true);
  }
  return scores.masked_fill(read.logical_not(), kBarred);
}

// Whether the fused kernel can compute this balance.
bool fits_kernel(const at::Tensor& scores, Form form) {
  return scores.device().is_cpu() && (form == Form::kFull || form == Form::kPrefix);
}

std::vector<std::int64_t> solved_sizes(const at::Tensor& scores, Form form) {
  return {scores.size(0), scores.size(1), form == Form::kPrefix ? scores.size(2) : 1, 1};
}

const at::Tensor& scores_of(at::TensorList inputs) {
  TORCH_CHECK_VALUE(inputs.size() == 1, "birkhoff: inputs must be scores, not ", inputs.size(),
                    " tensors");
  return inputs[0];
}

at::Tensor balanced(const at::Tensor& scores, std::int64_t iterations, Form form) {
  const at::Tensor read = masked(scores, form);
  switch (form) {
    case Form::kFull:
      return balance(read, iterations, Path::kFused);
    case Form::kPrefix:
      return prefix_balance(read, iterations, /*first_row=*/0, Path::kFused);
    case Form::kCumulative:
      return cumulative_balance(read, iterations, Path::kFused);
    case Form::kNone:
      return softmax_with_null(read);
  }
  return {};
}

}  // namespace

Tensors AttentionInBlocks::forward(at::TensorList inputs) const {
  const Call call(inputs, *this);
  const c10::OptionalDeviceGuard guard(inputs[0].device());
  const BlockAttention attention = call.attention(inputs);
  const at::Tensor& q = inputs[0];
  if (has_two_passes(attention)) {
    const BlockResults result = fused_forward(attention);
    return {laid_out_as(q, call.blocks().from_blocks(result.out_BHNbD, 2)), result.softmax_2BHNb};
  }
  const at::Tensor out_BHNbD = attend_in_blocks(attention, Path::kFused);
  return {laid_out_as(q, call.blocks().from_blocks(out_BHNbD, 2)),
          at::zeros({2, q.size(0), q.size(1), call.blocks().num_blocks(), call.blocks().block()},
                    q.options().dtype(at::toOpMathType(q.scalar_type())))};
}

Tensors AttentionInBlocks::meta(at::TensorList inputs) const {
  check_options(inputs, *this);
  const at::Tensor& q = inputs[0];
  const bool whole = block == kWholeSequence;
  const c10::SymInt L = q.sym_size(2), N = whole ? c10::SymInt(1) : (L + (block - 1)) / block;
  const c10::SymInt tokens = whole ? L : L.min(block);  // as block_within()
  return {at::empty_like(q),
          at::empty_symint({2, q.sym_size(0), q.sym_size(1), N, tokens},
                           q.options().dtype(at::toOpMathType(q.scalar_type())))};
}

Tensors AttentionInBlocks::backward(at::TensorList gradients, at::TensorList inputs,
                                    at::TensorList saved) const {
  const Call call(inputs, *this);
  const c10::OptionalDeviceGuard guard(inputs[0].device());
  const Blocks& blocks = call.blocks();
  const at::Tensor& q = inputs[0];
  check_given(gradients, {{"d_out", q.scalar_type(), q.sizes().vec()}});
  check_given(saved, {{"out", q.scalar_type(), q.sizes().vec()},
                      {"softmax",
                       at::toOpMathType(q.scalar_type()),
                       {2, q.size(0), q.size(1), blocks.num_blocks(), blocks.block()}}});
  const auto backward = [&](const BlockAttention& attention) {
    const c10::AutoGradMode without_gradients(false);
    return fused_backward(attention, {blocks.to_blocks(saved[0], 2), saved[1]},
                          blocks.to_blocks(gradients[0], 2));
  };
  // Local attention only splits its inputs into blocks: autograd would cost more than the kernel.
  if (call.is_local()) {
    if (const BlockAttention attention = call.attention(inputs); has_two_passes(attention)) {
      const Tensors made = backward(attention);  // of the inputs that there are
      Tensors results;
      auto gradient = made.cbegin();
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const at::Tensor& x = inputs[i];
        if (is_none(x)) {
          results.push_back(no_gradient(x));
        } else {
          results.push_back(
              laid_out_as(x, i <= kValues ? blocks.from_blocks(*gradient, 2) : *gradient));
          ++gradient;
        }
      }
      return results;
    }
  }
  return differentiate(
      [&](const Tensors& x) -> Differentiated {
        const BlockAttention attention = call.attention(x);
        if (!has_two_passes(attention)) {
          return {{blocks.from_blocks(attend_in_blocks(attention, Path::kFused), 2)},
                  {gradients[0]}};
        }
        // Autograd handles everything before the block attention; the kernel handles the rest.
        Tensors values{attention.q_BHNbD}, biases;
        for (const KeyBlocks& keys : attention.keys) {
          values.insert(values.end(), {keys.k_BHNbD, keys.v_BHNbD});
          if (keys.bias_BHNbb.defined()) biases.push_back(keys.bias_BHNbb);
        }
        values.insert(values.end(), biases.begin(), biases.end());
        for (const std::size_t term : {kRelativeKeys, kRelativeValues, kSink}) {
          if (has(x, term)) values.push_back(x[term]);
        }
        return {values, backward(attention)};
      },
      inputs);
}

at::Tensor open_block_pairs(const at::Tensor& q, std::int64_t block,
                            const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_block(block);
  check_mask_types(q, key_lengths, segments);
  const c10::OptionalDeviceGuard guard(q.device());
  TORCH_CHECK_VALUE(q.dim() == 4 && q.numel() > 0,
                    "birkhoff: q must be [B, H, L, D], none of them 0, not ", q.sizes());
  const Blocks blocks = blocks_of(q, block, /*causal=*/true, key_lengths, segments);
  const std::int64_t N = blocks.num_blocks();
  const at::Tensor open_BNN = open_pairs(blocks);
  if (!open_BNN.defined()) return at::ones({q.size(0), 1, N, N}, blocks.mask_options());
  return open_BNN.unsqueeze(1).expand({q.size(0), 1, N, N}).contiguous();
}

Tensors SinkhornBalance::forward(at::TensorList inputs) const {
  const at::Tensor& scores = scores_of(inputs);
  const c10::OptionalDeviceGuard guard(scores.device());
  const Form form = form_named(balance);
  check_balance(scores, iterations, form);
  if (!fits_kernel(scores, form)) {
    return {laid_out_as(scores, balanced(scores, iterations, form)),
            at::ones(solved_sizes(scores, form), scores.options().dtype(at::kBool))};
  }
  const auto [weights, solved] =
      fused_balance_forward(masked(scores, form), iterations, form == Form::kPrefix, 0);
  return {laid_out_as(scores, weights), solved};
}

Tensors SinkhornBalance::meta(at::TensorList inputs) const {
  const at::Tensor& scores = scores_of(inputs);
  const c10::SymInt rows =
      form_named(balance) == Form::kPrefix ? scores.sym_size(2) : c10::SymInt(1);
  check_iterations(iterations);
  return {at::empty_like(scores),
          at::empty_symint({scores.sym_size(0), scores.sym_size(1), rows, 1},
                           scores.options().dtype(at::kBool))};
}

Tensors SinkhornBalance::backward(at::TensorList gradients, at::TensorList inputs,
                                  at::TensorList saved) const {
  const at::Tensor& scores = scores_of(inputs);
  const c10::OptionalDeviceGuard guard(scores.device());
  const Form form = form_named(balance);
  check_balance(scores, iterations, form);
  check_given(gradients, {{"d_weights", scores.scalar_type(), scores.sizes().vec()}});
  check_given(saved, {{"solved", at::kBool, solved_sizes(scores, form)}});
  if (fits_kernel(scores, form)) {
    return {laid_out_as(scores, fused_balance_backward(gradients[0], masked(scores, form), saved[0],
                                                       iterations, form == Form::kPrefix, 0))};
  }
  return differentiate(
      [&](const Tensors& x) -> Differentiated {
        return {{balanced(x[0], iterations, form)}, {gradients[0]}};
      },
      inputs);
}

}  // namespace birkhoff::ops
