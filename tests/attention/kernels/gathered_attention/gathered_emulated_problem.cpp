// Problems of attention over gathered rows, solved by the emulated GPU kernels.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <utility>

#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/gathered_attention/gpu_arguments.h"
#include "attention/kernels/gathered_attention/parts.h"
#include "tests/attention/kernels/gathered_attention/gathered_emulated.h"
#include "tests/attention/kernels/gathered_attention/gathered_problem.h"

namespace birkhoff::test {
namespace {

using torch::autograd::variable_list;

GatheredParams with_tiles(GatheredParams params, const EmulatedTiles* tiles) {
  if (tiles == nullptr) {
    params.tensor_cores = false;
    EXPECT_FALSE(params.queries.once || params.keys.once);
  } else {
    EXPECT_TRUE(params.tensor_cores);
  }
  return params;
}

}  // namespace

std::vector<at::Tensor> solve_emulated(const GatheredProblem& problem, const EmulatedTiles* tiles) {
  GatheredAttention in = problem.attention;
  // As attend_gathered() passes them on.
  for (at::Tensor* x :
       {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &in.relative.keys_HRD, &in.relative.values_HRD,
        &in.relative.bias_HR, &in.sink_H, &in.rows.band.positions_q_BHL,
        &in.rows.band.positions_k_BHS, &in.key_lengths_B}) {
    if (x->defined()) *x = x->detach().contiguous();
  }
  const std::int64_t D = in.q_BHLD.size(3);
  const auto unpadded = [&](const at::Tensor& x) { return x.narrow(-1, 0, D); };
  if (tiles != nullptr) in = with_gpu_rows(in);
  at::Tensor joined_sink;  // after the kernels
  if (in.merge == SlotMerge::kOneSoftmax) std::swap(joined_sink, in.sink_H);
  const auto spoil = [](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& x : tensors) {
      if (x.defined()) x.fill_(NAN);
    }
  };
  // Results that kernels write only in part begin as 0.
  const auto spoil_results = [&](const RowLists& lists, bool writes_rows,
                                 const std::vector<at::Tensor>& tensors) {
    if (!writes_rows || lists.whole) return spoil(tensors);
    for (const at::Tensor& x : tensors) EXPECT_EQ(x.count_nonzero().item<std::int64_t>(), 0);
  };
  const GatheredForward forward = gathered_forward(in);
  const AttentionPart& made = forward.results.part;
  spoil(forward.scratch);
  spoil_results(in.rows.queries, forward.params.queries.once,
                {made.out_BHLD, made.max_BHL, made.sum_BHL});
  emulate_gathered_slots(with_tiles(forward.params, tiles), tiles);
  add_values(forward);
  emulate_gathered_merge(forward.params);

  const bool mean = in.merge == SlotMerge::kMean;
  const AttentionPart rows_made{unpadded(made.out_BHLD), made.max_BHL, made.sum_BHL};
  variable_list inputs{rows_made.out_BHLD.set_requires_grad(true),
                       made.sum_BHL.set_requires_grad(true)};
  if (joined_sink.defined()) inputs.push_back(joined_sink.set_requires_grad(true));
  const AttentionPart part = joined_sink.defined() ? with_sink(rows_made, joined_sink) : rows_made;
  const at::Tensor lse = mean ? part.sum_BHL.gt(0).to(at::kFloat) : finite_lse(part);
  variable_list outputs{part.out_BHLD}, d_outputs{problem.d_out_BHLD};
  if (!mean) {
    outputs.push_back(lse);
    d_outputs.push_back(problem.d_lse_BHL);
  }
  const variable_list d_inputs =
      torch::autograd::grad(outputs, inputs, d_outputs, /*retain_graph=*/false,
                            /*create_graph=*/false, /*allow_unused=*/true);

  const at::NoGradGuard no_grad;
  const at::Tensor d_out = tiles == nullptr ? d_inputs[0].contiguous()
                                            : gradient_with_gpu_rows(in, d_inputs[0].contiguous()),
                   d_sum = mean ? at::Tensor() : d_inputs[1].contiguous();
  const GatheredBackward backward = gathered_backward(in, forward.results, d_out, d_sum);
  spoil(backward.scratch);
  spoil({backward.d_sink_BHL});
  const GatheredGradients& rows = backward.gradients;
  spoil_results(in.rows.queries, backward.params.queries.once, {rows.d_q_BHLD});
  spoil_results(in.rows.keys, backward.params.keys.once, {rows.d_k_BHSD, rows.d_v_BHSD});
  emulate_gathered_attention_backward(with_tiles(backward.params, tiles), tiles);
  const GatheredGradients gradients = finished_gradients(
      in, backward, d_out, [&](const at::Tensor& numbers_BHPR, const at::Tensor& sums_BHLR) {
        spoil({sums_BHLR});
        emulate_sums_of_slots(backward.params, rows_params(numbers_BHPR),
                              static_cast<int>(numbers_BHPR.size(3)), rows_params(sums_BHLR));
      });
  variable_list results{part.out_BHLD.detach(), lse.detach()};
  for (const at::Tensor& each : {gradients.d_q_BHLD, gradients.d_k_BHSD, gradients.d_v_BHSD,
                                 gradients.d_relative_keys_HRD, gradients.d_relative_values_HRD}) {
    if (each.defined()) results.push_back(unpadded(each));
  }
  if (in.sink_H.defined()) results.push_back(gradients.d_sink_H);
  if (joined_sink.defined()) results.push_back(d_inputs[2]);
  if (in.relative.bias_HR.defined()) results.push_back(gradients.d_relative_bias_HR);
  return results;
}

}  // namespace birkhoff::test
