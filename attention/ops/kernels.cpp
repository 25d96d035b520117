#include "attention/ops/kernels.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <limits>
#include <vector>

#include "attention/balance.h"
#include "attention/blocks.h"
#include "attention/fused_block_attention.h"

namespace birkhoff::ops {
namespace {

using Tensors = std::vector<at::Tensor>;

// Gradients of run(inputs), given that of its result, by running it under autograd, which an
// operator's kernel lies below.
Tensors differentiate(const std::function<at::Tensor(const Tensors&)>& run, const Tensors& inputs,
                      const at::Tensor& d_result) {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const c10::impl::ForceDispatchKeyGuard with_autograd(keys);
  const c10::AutoGradMode with_gradients(true);
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().requires_grad_(true));
  return torch::autograd::grad({run(leaves)}, leaves, {d_result});
}

// x in the layout that autograd, compiled graphs and a kernel's meta function all expect.
at::Tensor laid_out_as(const at::Tensor& model, const at::Tensor& x) {
  const at::Tensor result = at::empty_like(model);
  return result.strides() == x.strides() ? x : result.copy_(x);
}

Blocks blocks_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t block,
                 bool causal) {
  TORCH_CHECK_VALUE(q.dim() == 4 && q.numel() > 0, "birkhoff: q must be [B, H, L, D], not ",
                    q.sizes());
  for (const at::Tensor& x : {k, v}) {
    TORCH_CHECK_VALUE(x.sizes() == q.sizes(), "birkhoff: k and v must be like q, which is ",
                      q.sizes(), ", not ", x.sizes());
    TORCH_CHECK_VALUE(x.scalar_type() == q.scalar_type() && x.device() == q.device(),
                      "birkhoff: q, k and v must have one dtype and one device");
  }
  TORCH_CHECK_VALUE(block >= 1, "birkhoff: block must be at least 1, not ", block);
  AttentionInput in;
  in.q_BHLD = q;
  in.k_BHSD = k;
  in.v_BHSD = v;
  return Blocks(in, block, causal);
}

BlockAttention window_attention(const Blocks& blocks, const at::Tensor& q, const at::Tensor& k,
                                const at::Tensor& v, std::int64_t look_back,
                                std::int64_t look_ahead, bool causal) {
  TORCH_CHECK_VALUE(look_back >= 0 && look_ahead >= 0 && !(causal && look_ahead > 0),
                    "birkhoff: look_back ", look_back, " and look_ahead ", look_ahead,
                    " must not be negative, and look_ahead is 0 where attention is causal");
  return {.q_BHNbD = blocks.fold(q, 2),
          .keys = {neighbouring_keys(blocks, k, v, look_back, look_ahead, causal)},
          .noise = {}};
}

// What a causal destination may be mixed of: earlier blocks alone, whatever the user's weights are.
at::Tensor mixing_weights(const at::Tensor& weights, bool causal) {
  return causal ? weights.tril(-1) : weights;
}

BlockAttention sorted_and_own_attention(const Blocks& blocks, const at::Tensor& q,
                                        const at::Tensor& k, const at::Tensor& v,
                                        const at::Tensor& weights, std::int64_t block,
                                        bool causal) {
  const std::int64_t B = q.size(0), H = q.size(1), N = blocks.num_blocks();
  TORCH_CHECK_VALUE(causal || q.size(2) % block == 0, "birkhoff: ", q.size(2),
                    " tokens are no whole number of blocks of ", block,
                    ", which attention that is not causal needs");
  TORCH_CHECK_VALUE(weights.sizes() == at::IntArrayRef({B, H, N, N}),
                    "birkhoff: block weights (or their scores) must be ",
                    at::IntArrayRef({B, H, N, N}), ", not ", weights.sizes());
  const KeyBlocks own = neighbouring_keys(blocks, k, v, 0, 0, causal);
  KeyBlocks sorted;
  const at::Tensor mixing = mixing_weights(weights, causal);
  sorted.k_BHNbD = mix_blocks(mixing, own.k_BHNbD);
  sorted.v_BHNbD = mix_blocks(mixing, own.v_BHNbD);
  sorted.legal_BHNbb.emplace_back();
  if (causal) {
    sorted.legal_BHNbb[0] = at::arange(N, q.options().dtype(at::kLong)).gt(0).view({1, 1, N, 1, 1});
  }
  return {.q_BHNbD = blocks.fold(q, 2), .keys = {sorted, own}, .noise = {}};
}

std::tuple<at::Tensor, at::Tensor> attend(const Blocks& blocks, const BlockAttention& attention,
                                          const at::Tensor& q) {
  if (fits_fused(attention)) {
    const BlockResults result = fused_forward(attention);
    return {laid_out_as(q, blocks.unfold(result.out_BHNbD, 2)), result.softmax_2BHNb};
  }
  const at::IntArrayRef sizes = attention.q_BHNbD.sizes();
  return {laid_out_as(q, blocks.unfold(attend_in_blocks(attention, fastest_path(attention)), 2)),
          at::zeros({2, sizes[0], sizes[1], sizes[2], sizes[3]},
                    q.options().dtype(at::toOpMathType(q.scalar_type())))};
}

// The balance's causal forms and the ordinary one.
enum class Form { kFull, kPrefix, kCumulative, kNone };

Form form_named(std::string_view name) {
  if (name == "full") return Form::kFull;
  if (name == "prefix") return Form::kPrefix;
  if (name == "cumulative") return Form::kCumulative;
  TORCH_CHECK_VALUE(name == "none", "birkhoff: balance is '", name,
                    "'; it must be full, prefix, cumulative or none");
  return Form::kNone;
}

// Scores with -inf where a form reads none: prefix bars destination 0, which has no source and
// takes no part in others' balance, the other causal ones all but earlier sources.
at::Tensor barred(const at::Tensor& scores, Form form) {
  if (form == Form::kFull) return scores;
  const std::int64_t N = scores.size(-1);
  const at::Tensor earlier_NN = at::ones({N, N}, scores.options().dtype(at::kBool)).tril(-1);
  const at::Tensor read = form == Form::kPrefix ? earlier_NN.any(1, /*keepdim=*/true) : earlier_NN;
  return scores.masked_fill(read.logical_not(), -std::numeric_limits<double>::infinity());
}

// Whether the fused kernel does this.
bool fits_kernel(const at::Tensor& scores, Form form) {
  return scores.device().is_cpu() && (form == Form::kFull || form == Form::kPrefix);
}

at::Tensor balanced(const at::Tensor& scores, std::int64_t iterations, Form form) {
  const at::Tensor read = barred(scores, form);
  switch (form) {
    case Form::kFull:
      return balance(read, iterations, BalancePath::kFused);
    case Form::kPrefix:
      return prefix_balance(read, iterations, /*first_row=*/0, BalancePath::kFused);
    case Form::kCumulative:
      return cumulative_balance(read, iterations, BalancePath::kFused);
    case Form::kNone:
      return softmax_with_null(read);
  }
  return {};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> block_local_attention(const at::Tensor& q, const at::Tensor& k,
                                                         const at::Tensor& v, std::int64_t block,
                                                         std::int64_t look_back,
                                                         std::int64_t look_ahead, bool causal) {
  const Blocks blocks = blocks_of(q, k, v, block, causal);
  return attend(blocks, window_attention(blocks, q, k, v, look_back, look_ahead, causal), q);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> block_local_attention_backward(
    const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& softmax, std::int64_t block, std::int64_t look_back,
    std::int64_t look_ahead, bool causal) {
  const Blocks blocks = blocks_of(q, k, v, block, causal);
  const BlockAttention attention = window_attention(blocks, q, k, v, look_back, look_ahead, causal);
  Tensors gradients;
  if (fits_fused(attention)) {
    for (const at::Tensor& x :
         fused_backward(attention, {blocks.fold(out, 2), softmax}, blocks.fold(d_out, 2))) {
      gradients.push_back(blocks.unfold(x, 2));
    }
  } else {
    gradients = differentiate(
        [&](const Tensors& x) {
          const BlockAttention again =
              window_attention(blocks, x[0], x[1], x[2], look_back, look_ahead, causal);
          return blocks.unfold(attend_in_blocks(again, fastest_path(again)), 2);
        },
        {q, k, v}, d_out);
  }
  return {laid_out_as(q, gradients[0]), laid_out_as(k, gradients[1]), laid_out_as(v, gradients[2])};
}

std::tuple<at::Tensor, at::Tensor> sorted_attention(const at::Tensor& q, const at::Tensor& k,
                                                    const at::Tensor& v, const at::Tensor& weights,
                                                    std::int64_t block, bool causal) {
  const Blocks blocks = blocks_of(q, k, v, block, causal);
  return attend(blocks, sorted_and_own_attention(blocks, q, k, v, weights, block, causal), q);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sorted_attention_backward(
    const at::Tensor& d_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& weights, const at::Tensor& out, const at::Tensor& softmax, std::int64_t block,
    bool causal) {
  const Blocks blocks = blocks_of(q, k, v, block, causal);
  const BlockAttention attention =
      sorted_and_own_attention(blocks, q, k, v, weights, block, causal);
  Tensors gradients;
  if (fits_fused(attention)) {
    const Tensors parts =
        fused_backward(attention, {blocks.fold(out, 2), softmax}, blocks.fold(d_out, 2));
    const KeyBlocks& own = attention.keys[1];
    gradients.push_back(blocks.unfold(parts[0], 2));
    // x_sorted = W x for keys and values: d_W = d_sorted x^T, d_x = W^T d_sorted + what x got
    // itself.
    const at::Tensor mixing_t = mixing_weights(weights, causal).transpose(2, 3);
    at::Tensor d_weights;
    for (const auto& [x, d_sorted, d_own] :
         {std::tie(own.k_BHNbD, parts[1], parts[3]), std::tie(own.v_BHNbD, parts[2], parts[4])}) {
      const at::Tensor part = at::matmul(d_sorted.flatten(3), x.flatten(3).transpose(2, 3));
      d_weights = d_weights.defined() ? d_weights + part : part;
      gradients.push_back(blocks.unfold(mix_blocks(mixing_t, d_sorted) + d_own, 2));
    }
    gradients.push_back(mixing_weights(d_weights, causal));
  } else {
    gradients = differentiate(
        [&](const Tensors& x) {
          const BlockAttention again =
              sorted_and_own_attention(blocks, x[0], x[1], x[2], x[3], block, causal);
          return blocks.unfold(attend_in_blocks(again, fastest_path(again)), 2);
        },
        {q, k, v, weights}, d_out);
  }
  return {laid_out_as(q, gradients[0]), laid_out_as(k, gradients[1]), laid_out_as(v, gradients[2]),
          laid_out_as(weights, gradients[3])};
}

std::tuple<at::Tensor, at::Tensor> sinkhorn_balance(const at::Tensor& scores,
                                                    std::int64_t iterations,
                                                    std::string_view name) {
  const Form form = form_named(name);
  TORCH_CHECK_VALUE(scores.dim() == 4 && scores.size(2) == scores.size(3) && scores.numel() > 0,
                    "birkhoff: scores must be [B, H, N, N], not ", scores.sizes());
  TORCH_CHECK_VALUE(scores.scalar_type() == at::kFloat || scores.scalar_type() == at::kDouble,
                    "birkhoff: scores must be float32 or float64, not ", scores.scalar_type());
  TORCH_CHECK_VALUE(iterations >= 1, "birkhoff: iterations must be at least 1, not ", iterations);
  const std::int64_t rows = form == Form::kPrefix ? scores.size(2) : 1;
  if (!fits_kernel(scores, form)) {
    return {laid_out_as(scores, balanced(scores, iterations, form)),
            at::ones({scores.size(0), scores.size(1), rows, 1}, scores.options().dtype(at::kBool))};
  }
  const auto [weights, solved] =
      fused_balance_forward(barred(scores, form), iterations, form == Form::kPrefix, 0);
  return {laid_out_as(scores, weights), solved};
}

at::Tensor sinkhorn_balance_backward(const at::Tensor& d_weights, const at::Tensor& scores,
                                     const at::Tensor& solved, std::int64_t iterations,
                                     std::string_view name) {
  const Form form = form_named(name);
  if (fits_kernel(scores, form)) {
    return laid_out_as(scores, fused_balance_backward(d_weights, barred(scores, form), solved,
                                                      iterations, form == Form::kPrefix, 0));
  }
  const Tensors gradients = differentiate(
      [&](const Tensors& x) { return balanced(x[0], iterations, form); }, {scores}, d_weights);
  return laid_out_as(scores, gradients[0]);
}

}  // namespace birkhoff::ops
