// Legend: B batch, H heads, N blocks, b tokens per block, D head dim.
#include "attention/kernels/block_attention/paths.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "attention/kernels/block_attention/cpu_tasks.h"
#include "attention/kernels/block_attention/gpu_arguments.h"
#include "attention/kernels/block_attention/gpu_terms.h"
#include "attention/kernels/common/fitting_rows.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

BlockResults attend(const BlockOperands& operands) {
  const BlockResults results = new_results(operands);
  if (operands.q_BHNbD.is_cpu()) {
    attend_in_tiles(operands, results);
  } else if constexpr (kHasGpuKernels) {
    const DistanceTerms terms = forward_terms(operands);
    launch_block_attention(block_attention_params(operands, results, terms),
                           current_stream(operands.q_BHNbD));
    add_values(terms, results);
  }
  return results;
}

BlockGradients gradients_of(const BlockOperands& operands, const BlockResults& results,
                            const at::Tensor& d_out) {
  if (d_out.is_cpu()) {
    BlockGradients gradients = new_gradients(operands, at::kDouble);
    gradients_in_tiles(operands, results, d_out, gradients);
    return gradients;
  }
  BlockGradients gradients = new_gradients(operands, at::kFloat);
  if constexpr (kHasGpuKernels) {
    const at::Tensor delta_BHNb = at::empty_like(results.softmax_2BHNb[0]);
    const DistanceTerms terms = backward_terms(operands, d_out);
    launch_block_attention_backward(
        block_attention_params(operands, results, d_out, delta_BHNb, terms, gradients),
        current_stream(d_out));
    add_term_gradients(operands, results, d_out, delta_BHNb, terms, gradients);
  }
  return gradients;
}

// The gradient of a bias, from sums that are separate for each block of each head. Sums one dim at
// a time, because a LibTorch sum over several dims at once would depend on the number of threads.
at::Tensor sum_to_bias(at::Tensor sums, const at::Tensor& bias) {
  for (std::int64_t dim = 0; dim < 3; ++dim) {
    if (bias.size(dim) == 1) sums = sums.sum(dim, /*keepdim=*/true);
  }
  return sums.to(bias.scalar_type());
}

// Gradients of q, of all keys and values, of the defined biases and weights, and of the tables and
// sinks that are defined.
variable_list listed(const BlockOperands& operands, const BlockGradients& made) {
  variable_list result{without_padding(made.d_q_BHNbD, operands.padding)};
  for (const KeyGradients& keys : made.keys) {
    result.insert(result.end(), {without_padding(keys.d_k_BHNbD, operands.padding),
                                 without_padding(keys.d_v_BHNbD, operands.padding)});
  }
  for (std::size_t s = 0; s < made.keys.size(); ++s) {
    const KeyBlocks& keys = operands.keys[s];
    if (keys.bias_BHNbb.defined()) {
      result.push_back(sum_to_bias(made.keys[s].d_bias, keys.bias_BHNbb));
    }
    if (keys.weights_BHN.defined()) {
      result.push_back(made.keys[s].d_weights_BHN.to(keys.weights_BHN.scalar_type()));
    }
  }
  for (const at::Tensor* each : {&made.d_relative_keys_HRD, &made.d_relative_values_HRD}) {
    if (each->defined()) result.push_back(without_padding(*each, operands.padding));
  }
  for (const at::Tensor* each : {&made.d_sink_H, &made.d_relative_bias_HR}) {
    if (each->defined()) result.push_back(*each);
  }
  return result;
}

BlockOperands fitting_operands(const BlockAttention& in, NoiseColumns columns) {
  BlockOperands operands = operands_of(in, columns);
  return in.q_BHNbD.is_cuda() ? with_gpu_rows(std::move(operands))
                              : with_cpu_rows(std::move(operands));
}

// The gradient of an output without padding, in the form of the operands.
at::Tensor fitting_gradient(const BlockOperands& operands, const at::Tensor& d_out) {
  return with_fitting_rows(operands.padding == 0 ? d_out : with_whole_columns(d_out));
}

struct FusedBlockAttention : torch::autograd::Function<FusedBlockAttention> {
  // Autograd sees q, the keys, and the biases, weights, tables and sinks that are defined; `in`
  // holds them again, with everything else.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*q_BHNbD*/,
                            at::TensorList /*keys_BHNbD*/, at::TensorList /*others*/,
                            const BlockAttention& in, NoiseColumns columns) {
    const BlockOperands operands = fitting_operands(in, columns);
    const BlockResults results = attend(operands);
    save(context, operands, results);
    return without_padding(results.out_BHNbD, operands.padding);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const auto [operands, results] = restore(context);
    const at::Tensor d_out = fitting_gradient(operands, gradients[0]);
    variable_list result = listed(operands, gradients_of(operands, results, d_out));
    result.resize(result.size() + 2);  // none for `in` and `columns`
    return result;
  }

 private:
  static void save(AutogradContext* context, const BlockOperands& operands,
                   const BlockResults& results) {
    const NoiseKey noise = operands.noise.value_or(NoiseKey{});
    // The CPU loop does not need `out` in its backward pass.
    const at::Tensor out = results.out_BHNbD.is_cpu() ? at::Tensor() : results.out_BHNbD;
    variable_list saved{operands.q_BHNbD,
                        out,
                        results.softmax_2BHNb,
                        noise.step,
                        noise.sample_ids_B,
                        operands.relative.keys_HRD,
                        operands.relative.values_HRD,
                        operands.sink_H,
                        operands.relative.bias_HR};
    std::vector<std::int64_t> windows;
    for (const KeyBlocks& keys : operands.keys) {
      saved.insert(saved.end(), {keys.k_BHNbD, keys.v_BHNbD, keys.bias_BHNbb, keys.chosen_BHN,
                                 keys.weights_BHN});
      saved.insert(saved.end(), keys.mask_BHNbb.begin(), keys.mask_BHNbb.end());
      windows.insert(windows.end(), {keys.window.first_offset, keys.window.last_offset,
                                     keys.window.causal, keys.in_place});
    }
    context->save_for_backward(std::move(saved));
    context->saved_data["windows"] = windows;
    context->saved_data["dropout"] = static_cast<double>(operands.dropout);
    context->saved_data["noise"] = noise.integers();
    context->saved_data["columns"] =
        std::vector<std::int64_t>{operands.columns.first, operands.columns.all};
    context->saved_data["least"] = operands.relative.least;
    context->saved_data["padding"] = operands.padding;
  }

  static std::pair<BlockOperands, BlockResults> restore(AutogradContext* context) {
    const variable_list saved = context->get_saved_variables();
    const std::vector<std::int64_t> columns = context->saved_data["columns"].toIntVector();
    const std::vector<std::int64_t> windows = context->saved_data["windows"].toIntVector();
    BlockOperands operands;
    operands.q_BHNbD = saved[0];
    auto next = saved.begin() + 9;
    for (std::size_t w = 0; w < windows.size(); w += 4) {
      KeyBlocks& keys = operands.keys.emplace_back();
      keys.window = {.first_offset = static_cast<int>(windows[w]),
                     .last_offset = static_cast<int>(windows[w + 1]),
                     .causal = windows[w + 2] != 0};
      keys.in_place = windows[w + 3] != 0;
      keys.k_BHNbD = *next++;
      keys.v_BHNbD = *next++;
      keys.bias_BHNbb = *next++;
      keys.chosen_BHN = *next++;
      keys.weights_BHN = *next++;
      keys.mask_BHNbb = {next, next + keys.window.num_offsets()};
      next += keys.window.num_offsets();
    }
    operands.dropout = static_cast<float>(context->saved_data["dropout"].toDouble());
    if (saved[3].defined()) {
      operands.noise =
          NoiseKey::of_integers(context->saved_data["noise"].toIntVector(), saved[3], saved[4]);
    }
    operands.columns = {.first = columns[0], .all = columns[1]};
    operands.relative = {.keys_HRD = saved[5],
                         .values_HRD = saved[6],
                         .bias_HR = saved[8],
                         .least = context->saved_data["least"].toInt()};
    operands.sink_H = saved[7];
    operands.padding = context->saved_data["padding"].toInt();
    return {operands, {saved[1], saved[2]}};
  }
};

// One softmax over all of in.keys.
at::Tensor attend_entries(BlockAttention in, NoiseColumns columns) {
  std::vector<at::Tensor> keys_BHNbD, others;
  for (KeyBlocks& keys : in.keys) {
    keys_BHNbD.insert(keys_BHNbD.end(), {keys.k_BHNbD, keys.v_BHNbD});
    if (keys.bias_BHNbb.defined()) {
      while (keys.bias_BHNbb.dim() < 5) keys.bias_BHNbb = keys.bias_BHNbb.unsqueeze(0);
      others.push_back(keys.bias_BHNbb);
    }
    if (keys.weights_BHN.defined()) {
      keys.chosen_BHN = keys.chosen_BHN.contiguous();
      keys.weights_BHN = keys.weights_BHN.contiguous();
      others.push_back(keys.weights_BHN);
    }
  }
  for (const at::Tensor* each :
       {&in.relative.keys_HRD, &in.relative.values_HRD, &in.sink_H, &in.relative.bias_HR}) {
    if (each->defined()) others.push_back(*each);
  }
  return FusedBlockAttention::apply(in.q_BHNbD, at::TensorList(keys_BHNbD), at::TensorList(others),
                                    in, columns);
}

NoiseColumns all_columns(const BlockAttention& in) {
  NoiseColumns columns;
  for (const KeyBlocks& keys : in.keys) columns.all += num_columns(keys);
  return columns;
}

}  // namespace

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
  const BlockOperands operands = fitting_operands(in, all_columns(in));
  BlockResults results = attend(operands);
  results.out_BHNbD = without_padding(results.out_BHNbD, operands.padding);
  return results;
}

std::vector<at::Tensor> fused_backward(const BlockAttention& in, const BlockResults& results,
                                       const at::Tensor& d_out_BHNbD) {
  const BlockOperands operands = fitting_operands(in, all_columns(in));
  return listed(
      operands,
      gradients_of(operands, {fitting_gradient(operands, results.out_BHNbD), results.softmax_2BHNb},
                   fitting_gradient(operands, d_out_BHNbD)));
}

}  // namespace birkhoff
