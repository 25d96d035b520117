// Legend: B batch, H heads, N blocks, b tokens of a block, D head dim.
#include "attention/fused_block_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "attention/block_attention.h"
#include "attention/tile_dispatch.h"
#include "attention/tiled_block_attention.h"
#include "cluster/base/device.h"
#include "cluster/base/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x, or a copy of it that the kernels of its device can read.
at::Tensor with_fitting_rows(const at::Tensor& x) {
  if (x.is_cuda()) return with_aligned_rows(x);
  return x.stride(-1) == 1 ? x : x.contiguous();
}

BlockResults attend(const BlockOperands& operands) {
  const BlockResults results = new_results(operands);
#ifdef BIRKHOFF_CUDA
  if (operands.q_BHNbD.is_cuda()) {
    launch_block_attention(block_attention_params(operands, results),
                           current_stream(operands.q_BHNbD));
    return results;
  }
#endif
  attend_in_tiles(operands, results);
  return results;
}

BlockGradients gradients_of(const BlockOperands& operands, const BlockResults& results,
                            const at::Tensor& d_out) {
#ifdef BIRKHOFF_CUDA
  if (d_out.is_cuda()) {
    const BlockGradients gradients = new_gradients(operands, at::kFloat);
    const at::Tensor delta_BHNb = at::empty_like(results.softmax_2BHNb[0]);
    launch_block_attention_backward(
        block_attention_params(operands, results, d_out, delta_BHNb, gradients),
        current_stream(d_out));
    return gradients;
  }
#endif
  const BlockGradients gradients = new_gradients(operands, at::kDouble);
  gradients_in_tiles(operands, results, d_out, gradients);
  return gradients;
}

// The gradient of a bias from sums that have a place for each block of each head. One dim after
// another, because LibTorch's sum of all at once would depend on the number of threads.
at::Tensor sum_to_bias(at::Tensor sums, const at::Tensor& bias) {
  for (std::int64_t dim = 0; dim < 3; ++dim) {
    if (bias.size(dim) == 1) sums = sums.sum(dim, /*keepdim=*/true);
  }
  return sums.to(bias.scalar_type());
}

// Gradients of q, of all keys, and of the biases that there are.
variable_list listed(const BlockOperands& operands, const BlockGradients& made) {
  variable_list result{made.d_q_BHNbD};
  result.insert(result.end(), made.d_keys_BHNbD.begin(), made.d_keys_BHNbD.end());
  for (std::size_t s = 0; s < operands.num_sources(); ++s) {
    if (!made.d_biases[s].defined()) continue;
    result.push_back(sum_to_bias(made.d_biases[s], operands.biases[s]));
  }
  return result;
}

BlockOperands fitting_operands(const BlockAttention& in, NoiseColumns columns) {
  BlockOperands operands = operands_of(in, columns);
  operands.q_BHNbD = with_fitting_rows(operands.q_BHNbD);
  for (at::Tensor& keys : operands.keys_BHNbD) keys = with_fitting_rows(keys);
  return operands;
}

struct FusedBlockAttention : torch::autograd::Function<FusedBlockAttention> {
  // Autograd sees q, keys and the biases that there are; `in` holds them too, and what else there
  // is.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*q_BHNbD*/,
                            at::TensorList /*keys_BHNbD*/, at::TensorList /*biases*/,
                            const BlockAttention& in, NoiseColumns columns) {
    const BlockOperands operands = fitting_operands(in, columns);
    const BlockResults results = attend(operands);
    save(context, operands, results);
    return results.out_BHNbD;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const auto [operands, results] = restore(context);
    const at::Tensor d_out = with_fitting_rows(gradients[0]);
    variable_list result = listed(operands, gradients_of(operands, results, d_out));
    result.resize(result.size() + 2);  // of `in` and `columns`
    return result;
  }

 private:
  static void save(AutogradContext* context, const BlockOperands& operands,
                   const BlockResults& results) {
    const NoiseKey noise = operands.noise.value_or(NoiseKey{});
    // The loop on the CPU does without `out`.
    const at::Tensor out = results.out_BHNbD.is_cpu() ? at::Tensor() : results.out_BHNbD;
    variable_list saved{operands.q_BHNbD, out, results.softmax_2BHNb, noise.step,
                        noise.sample_ids_B};
    for (const auto* list : {&operands.keys_BHNbD, &operands.biases, &operands.legal_BHNbb}) {
      saved.insert(saved.end(), list->begin(), list->end());
    }
    context->save_for_backward(std::move(saved));
    context->saved_data["windows"] = operands.windows;
    context->saved_data["dropout"] = static_cast<double>(operands.dropout);
    context->saved_data["noise"] =
        std::vector<std::int64_t>{static_cast<std::int64_t>(noise.seed), noise.layer,
                                  operands.columns.first, operands.columns.all};
  }

  static std::pair<BlockOperands, BlockResults> restore(AutogradContext* context) {
    const variable_list saved = context->get_saved_variables();
    const std::vector<std::int64_t> noise = context->saved_data["noise"].toIntVector();
    BlockOperands operands;
    operands.q_BHNbD = saved[0];
    operands.windows = context->saved_data["windows"].toIntVector();
    const auto num_sources = static_cast<std::ptrdiff_t>(operands.windows.size() / 3);
    const auto keys = saved.begin() + 5, biases = keys + 2 * num_sources,
               legal = biases + num_sources;
    operands.keys_BHNbD = {keys, biases};
    operands.biases = {biases, legal};
    operands.legal_BHNbb = {legal, saved.end()};
    operands.dropout = static_cast<float>(context->saved_data["dropout"].toDouble());
    if (saved[3].defined()) {
      operands.noise = NoiseKey{.seed = static_cast<std::uint64_t>(noise[0]),
                                .step = saved[3],
                                .layer = static_cast<std::uint32_t>(noise[1]),
                                .sample_ids_B = saved[4]};
    }
    operands.columns = {.first = noise[2], .all = noise[3]};
    return {operands, {saved[1], saved[2]}};
  }
};

// One softmax over all of in.keys.
at::Tensor attend_entries(BlockAttention in, NoiseColumns columns) {
  std::vector<at::Tensor> keys_BHNbD, biases;
  for (KeyBlocks& keys : in.keys) {
    keys_BHNbD.insert(keys_BHNbD.end(), {keys.k_BHNbD, keys.v_BHNbD});
    if (!keys.bias_BHNbb.defined()) continue;
    while (keys.bias_BHNbb.dim() < 5) keys.bias_BHNbb = keys.bias_BHNbb.unsqueeze(0);
    biases.push_back(keys.bias_BHNbb);
  }
  return FusedBlockAttention::apply(in.q_BHNbD, at::TensorList(keys_BHNbD), at::TensorList(biases),
                                    in, columns);
}

NoiseColumns all_columns(const BlockAttention& in) {
  NoiseColumns columns;
  for (const KeyBlocks& keys : in.keys) columns.all += num_columns(keys);
  return columns;
}

}  // namespace

bool fits_fused(const BlockAttention& in) {
  if (in.q_BHNbD.is_cuda()) return fits_block_attention(in);
  if (!in.q_BHNbD.is_cpu() || in.q_BHNbD.size(4) > kMostTileHeadDim) return false;
  const at::ScalarType dtype = in.q_BHNbD.scalar_type();
  if (!has_tile_type(dtype)) return false;
  return std::all_of(in.keys.begin(), in.keys.end(), [&](const KeyBlocks& keys) {
    return keys.k_BHNbD.scalar_type() == dtype && keys.v_BHNbD.scalar_type() == dtype &&
           (!keys.bias_BHNbb.defined() || keys.bias_BHNbb.scalar_type() == dtype);
  });
}

at::Tensor attend_fused(const BlockAttention& in) {
  NoiseColumns columns = all_columns(in);
  if (in.one_softmax) return attend_entries(in, columns);
  at::Tensor out_BHNbD;
  for (const KeyBlocks& keys : in.keys) {
    BlockAttention one = in;
    one.keys = {keys};
    const at::Tensor part = attend_entries(one, columns);
    out_BHNbD = out_BHNbD.defined() ? out_BHNbD + part : part;
    columns.first += num_columns(keys);
  }
  return out_BHNbD;
}

BlockResults fused_forward(const BlockAttention& in) {
  return attend(fitting_operands(in, all_columns(in)));
}

std::vector<at::Tensor> fused_backward(const BlockAttention& in, const BlockResults& results,
                                       const at::Tensor& d_out_BHNbD) {
  const BlockOperands operands = fitting_operands(in, all_columns(in));
  return listed(
      operands,
      gradients_of(operands, {with_fitting_rows(results.out_BHNbD), results.softmax_2BHNb},
                   with_fitting_rows(d_out_BHNbD)));
}

}  // namespace birkhoff
