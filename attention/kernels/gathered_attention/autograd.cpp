// Legend: B batch, H heads, L queries, S keys, D head dim.
#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/gathered_attention/cpu_segments.h"
#include "attention/kernels/gathered_attention/gpu_arguments.h"
#include "attention/kernels/gathered_attention/paths.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

GatheredResults attend(const GatheredAttention& in) {
  if (in.q_BHLD.is_cpu()) return attend_in_segments(in);
  const GatheredForward forward = gathered_forward(in);
  if constexpr (kHasGpuKernels) {
    launch_gathered_slots(forward.params, current_stream(in.q_BHLD));
    add_values(forward);
    launch_gathered_merge(forward.params, current_stream(in.q_BHLD));
  }
  return forward.results;
}

GatheredGradients gradients_of(const GatheredAttention& in, const GatheredResults& results,
                               const at::Tensor& d_out, const at::Tensor& d_sum) {
  if (d_out.is_cpu()) return gradients_in_segments(in, results, d_out, d_sum);
  const GatheredBackward backward = gathered_backward(in, results, d_out, d_sum);
  if constexpr (kHasGpuKernels) {
    launch_gathered_attention_backward(backward.params, current_stream(d_out));
  }
  return finished_gradients(in, backward, d_out,
                            [&](const at::Tensor& numbers_BHPR, const at::Tensor& sums_BHLR) {
                              if constexpr (kHasGpuKernels) {
                                launch_sums_of_slots(backward.params, rows_params(numbers_BHPR),
                                                     static_cast<int>(numbers_BHPR.size(3)),
                                                     rows_params(sums_BHLR), current_stream(d_out));
                              }
                            });
}

struct FusedGatheredAttention : torch::autograd::Function<FusedGatheredAttention> {
  // Autograd sees q, k, v, and the relative positions and sinks that are defined; `in` holds them
  // again, with everything else. Returns the part.
  static variable_list forward(AutogradContext* context, const at::Tensor& /*q_BHLD*/,
                               const at::Tensor& /*k_BHSD*/, const at::Tensor& /*v_BHSD*/,
                               at::TensorList /*others*/, GatheredAttention in) {
    if (in.q_BHLD.is_cuda()) {
      in = with_gpu_rows(std::move(in));
    } else {
      in.q_BHLD = with_contiguous_rows(in.q_BHLD);
      in.k_BHSD = with_contiguous_rows(in.k_BHSD);
      in.v_BHSD = with_contiguous_rows(in.v_BHSD);
    }
    const GatheredResults results = attend(in);
    context->set_materialize_grads(false);
    variable_list constants{results.part.max_BHL};
    if (in.merge == SlotMerge::kMean) constants.push_back(results.part.sum_BHL);
    context->mark_non_differentiable(constants);
    save(context, in, results);
    return {without_padding(results.part.out_BHLD, in.padding), results.part.max_BHL,
            results.part.sum_BHL};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const auto [in, results] = restore(context);
    const at::Tensor given = gradients[0].defined()
                                 ? gradients[0]
                                 : at::zeros_like(without_padding(in.q_BHLD, in.padding));
    const at::Tensor d_out =
        given.is_cuda() ? gradient_with_gpu_rows(in, given) : with_contiguous_rows(given);
    const at::Tensor d_sum = gradients[2].defined() ? gradients[2].contiguous() : at::Tensor();
    const GatheredGradients made = gradients_of(in, results, d_out, d_sum);
    variable_list result;
    for (const at::Tensor* each : {&made.d_q_BHLD, &made.d_k_BHSD, &made.d_v_BHSD,
                                   &made.d_relative_keys_HRD, &made.d_relative_values_HRD}) {
      if (each->defined()) result.push_back(without_padding(*each, in.padding));
    }
    for (const at::Tensor* each : {&made.d_sink_H, &made.d_relative_bias_HR}) {
      if (each->defined()) result.push_back(*each);
    }
    result.emplace_back();  // none for `in`
    return result;
  }

 private:
  static void save(AutogradContext* context, const GatheredAttention& in,
                   const GatheredResults& results) {
    const RowLists &queries = in.rows.queries, &keys = in.rows.keys;
    const DistanceBand& band = in.rows.band;
    const NoiseKey noise = in.drops() ? *in.noise : NoiseKey{};
    // The CPU loop does not need `out` in its backward pass.
    const at::Tensor out = results.part.out_BHLD.is_cpu() ? at::Tensor() : results.part.out_BHLD;
    context->save_for_backward({in.q_BHLD,
                                in.k_BHSD,
                                in.v_BHSD,
                                results.part.max_BHL,
                                results.part.sum_BHL,
                                results.slots.out_BHPD,
                                results.slots.softmax_2BHP,
                                queries.rows_BHP,
                                queries.ends_BHG,
                                queries.order_BHP,
                                queries.starts_BHR,
                                keys.rows_BHP,
                                keys.ends_BHG,
                                keys.order_BHP,
                                keys.starts_BHR,
                                band.positions_q_BHL,
                                band.positions_k_BHS,
                                in.key_lengths_B,
                                out,
                                in.relative.keys_HRD,
                                in.relative.values_HRD,
                                in.sink_H,
                                in.relative.bias_HR,
                                noise.step,
                                noise.sample_ids_B});
    context->saved_data["band"] =
        std::vector<std::int64_t>{static_cast<std::int64_t>(band.of), band.least, band.most};
    context->saved_data["lists"] = std::vector<std::int64_t>{
        queries.once, queries.whole, queries.distinct, keys.once, keys.whole, keys.distinct};
    context->saved_data["merge"] = static_cast<std::int64_t>(in.merge);
    context->saved_data["least"] = in.relative.least;
    context->saved_data["padding"] = in.padding;
    context->saved_data["dropout"] = static_cast<double>(in.dropout);
    context->saved_data["noise"] = noise.integers();
  }

  static std::pair<GatheredAttention, GatheredResults> restore(AutogradContext* context) {
    const variable_list saved = context->get_saved_variables();
    const std::vector<std::int64_t> band = context->saved_data["band"].toIntVector();
    const std::vector<std::int64_t> facts = context->saved_data["lists"].toIntVector();
    const auto lists = [&](std::size_t first, const at::Tensor& x, std::size_t fact) {
      return RowLists{saved[first], saved[first + 1], saved[first + 2],     saved[first + 3],
                      x.size(2),    facts[fact] != 0, facts[fact + 1] != 0, facts[fact + 2] != 0};
    };
    GatheredAttention in{.q_BHLD = saved[0], .k_BHSD = saved[1], .v_BHSD = saved[2], .rows = {}};
    in.rows.queries = lists(7, in.q_BHLD, 0);
    in.rows.keys = lists(11, in.k_BHSD, 3);
    in.rows.band = {.of = static_cast<DistanceBand::Of>(band[0]),
                    .least = band[1],
                    .most = band[2],
                    .positions_q_BHL = saved[15],
                    .positions_k_BHS = saved[16]};
    in.key_lengths_B = saved[17];
    in.merge = static_cast<SlotMerge>(context->saved_data["merge"].toInt());
    in.relative = {.keys_HRD = saved[19],
                   .values_HRD = saved[20],
                   .bias_HR = saved[22],
                   .least = context->saved_data["least"].toInt()};
    in.sink_H = saved[21];
    in.padding = context->saved_data["padding"].toInt();
    if (saved[23].defined()) {
      in.dropout = static_cast<float>(context->saved_data["dropout"].toDouble());
      in.noise =
          NoiseKey::of_integers(context->saved_data["noise"].toIntVector(), saved[23], saved[24]);
    }
    return {in, {.part = {saved[18], saved[3], saved[4]}, .slots = {saved[5], saved[6]}}};
  }
};

}  // namespace

AttentionPart attend_gathered_fused(const GatheredAttention& in) {
  variable_list others;
  for (const at::Tensor* each :
       {&in.relative.keys_HRD, &in.relative.values_HRD, &in.sink_H, &in.relative.bias_HR}) {
    if (each->defined()) others.push_back(*each);
  }
  const variable_list part =
      FusedGatheredAttention::apply(in.q_BHLD, in.k_BHSD, in.v_BHSD, at::TensorList(others), in);
  return {part[0], part[1], part[2]};
}

}  // namespace birkhoff
