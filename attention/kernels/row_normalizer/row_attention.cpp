// Legend: B batch, H heads, L queries, S keys, D head dim, k kept keys.
#include "attention/kernels/row_normalizer/row_attention.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <utility>
#include <vector>

#include "attention/kernels/block_attention/gpu_arguments.h"
#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_sets.h"
#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/masked_softmax.h"
#include "attention/kernels/row_normalizer/cpu_rows.h"
#include "attention/kernels/row_normalizer/gpu_arguments.h"
#include "attention/kernels/row_normalizer/saved_rows.h"
#include "attention/kernels/tile_attention/cpu_heads.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {

template <typename T>
const RowKernels<T>& row_kernels(InstructionSet set) {
  return for_set(set, []<InstructionSet kSet>() -> const RowKernels<T>& {
    return compiled_row_kernels<kSetOf<kSet, false>, T>();
  });
}
template const RowKernels<float>& row_kernels(InstructionSet);
template const RowKernels<double>& row_kernels(InstructionSet);
template const RowKernels<Bf16>& row_kernels(InstructionSet);

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Column d of row i, which ends at distance 0, moves to the key at that distance from query i: from
// [B, H, L, S] to [B, H, L, S]. A zero before each row makes rows of S + 1; as rows of S, they are
// shifted by one more element each (Dai et al. 2019, appendix B).
at::Tensor to_keys(const at::Tensor& x_BHLS) {
  const std::int64_t L = x_BHLS.size(2), S = x_BHLS.size(3);
  const at::Tensor padded = at::constant_pad_nd(x_BHLS, {1, 0});
  return padded.flatten(2).narrow(2, L, L * S).unflatten(2, {L, S});
}

// The terms, or their gradients, of the pairs of a head. In contiguous rows each is one column
// further left than in the row before.
template <typename T>
Rows<T> terms_of_pairs(const at::Tensor& terms_BHLS, std::int64_t b, std::int64_t h) {
  if (!terms_BHLS.defined()) return {};
  const Rows<T> rows = head_rows<T>(terms_BHLS, b, h);
  return {rows.data + (terms_BHLS.size(2) - 1), rows.stride - 1};
}

// x has gradients in the backward pass. d_alpha_BHL: as in entmax_arguments().
void run_on_gpu(const RowTensors& x, const SavedRows& saved, const at::Tensor& d_alpha_BHL) {
  if (x.q_BHLD.numel() == 0 || x.k_BHSD.numel() == 0) return;
  if constexpr (kHasGpuKernels) {
    CUstream_st* const stream = current_stream(x.q_BHLD);
    const bool forward = !x.d_out_BHLD.defined();
    if (saved.kept_BL.defined()) {
      const RowArguments<TopKParams> arguments = top_k_arguments(x, saved);
      if (!forward) return launch_listed_gradients(arguments.params, stream);
      launch_top_k_choice(arguments.params, stream);
      return launch_listed_values(arguments.params, stream);
    }
    const RowArguments<EntmaxParams> arguments = entmax_arguments(x, saved, d_alpha_BHL);
    (forward ? launch_entmax : launch_entmax_backward)(arguments.params, stream);
  }
}

struct FusedRows : torch::autograd::Function<FusedRows> {
  // The forward pass.
  static std::pair<RowTensors, SavedRows> attend(const RowAttention& in) {
    RowTensors x;
    x.q_BHLD = with_fitting_rows(in.q_BHLD);
    x.k_BHSD = with_fitting_rows(in.k_BHSD);
    x.v_BHSD = with_fitting_rows(in.v_BHSD);
    x.out_BHLD = at::zeros_like(x.q_BHLD);  // stays 0 without keys
    if (in.distance_terms_BHLS.defined()) x.terms_BHLS = in.distance_terms_BHLS.contiguous();
    const SavedRows saved = new_saved_rows(in);
    if (x.q_BHLD.is_cuda()) {
      run_on_gpu(x, saved, {});
    } else {
      run(x, saved, in.dropout, in.noise, nullptr, /*forward=*/true);
    }
    return {x, saved};
  }

  // The gradients of q, k and v of x, and of alpha, if it learns, and the terms of distances, if
  // there are any.
  static variable_list gradients_of(RowTensors x, const SavedRows& saved, float dropout,
                                    const std::optional<NoiseKey>& noise,
                                    const at::Tensor& d_out_BHLD,
                                    std::optional<at::ScalarType> learned_alpha, bool has_terms) {
    x.d_out_BHLD = with_fitting_rows(d_out_BHLD);
    x.d_q_BHLD = at::zeros_like(x.q_BHLD);
    x.d_k_BHSD = at::zeros_like(x.k_BHSD);
    x.d_v_BHSD = at::zeros_like(x.v_BHSD);
    const auto sizes = x.q_BHLD.sizes();
    if (has_terms) {
      x.d_terms_BHLS =
          at::zeros({sizes[0], sizes[1], sizes[2], x.k_BHSD.size(2)},
                    x.q_BHLD.options().dtype(at::toOpMathType(x.q_BHLD.scalar_type())));
    }
    at::Tensor d_alpha_BH;
    const auto of_heads = x.q_BHLD.options().dtype(at::kDouble);
    if (x.q_BHLD.is_cuda()) {
      at::Tensor d_alpha_BHL;
      if (learned_alpha) d_alpha_BHL = at::zeros(sizes.slice(0, 3), of_heads.dtype(at::kFloat));
      run_on_gpu(x, saved, d_alpha_BHL);
      if (learned_alpha) d_alpha_BH = d_alpha_BHL.sum(2, /*keepdim=*/false, at::kDouble);
    } else {
      if (learned_alpha) d_alpha_BH = at::zeros(sizes.slice(0, 2), of_heads);
      run(x, saved, dropout, noise, learned_alpha ? d_alpha_BH.mutable_data_ptr<double>() : nullptr,
          /*forward=*/false);
    }
    variable_list result{x.d_q_BHLD, x.d_k_BHSD, x.d_v_BHSD};
    if (learned_alpha) result.push_back(d_alpha_BH.sum(0).to(*learned_alpha));
    if (has_terms) result.push_back(x.d_terms_BHLS);
    return result;
  }

  // `in` holds the tensors again, with everything else. `others`: alpha, if it learns, and the
  // terms of distances, if there are any.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*q_BHLD*/,
                            const at::Tensor& /*k_BHSD*/, const at::Tensor& /*v_BHSD*/,
                            at::TensorList /*others*/, const RowAttention& in) {
    const auto [x, saved] = attend(in);
    const at::Tensor& alpha_H = in.normalizer.alpha_H;
    const bool reads_terms = in.normalizer.kind != Normalizer::kTopK;
    const NoiseKey noise = in.noise.value_or(NoiseKey{});
    context->save_for_backward({x.q_BHLD, x.k_BHSD, x.v_BHSD, saved.first_BL, saved.end_BL,
                                saved.kept_BL, saved.index_BHLk, saved.weight_BHLk,
                                saved.threshold_BHL, saved.alpha_H, noise.step, noise.sample_ids_B,
                                reads_terms ? x.terms_BHLS : at::Tensor()});
    context->saved_data["has_terms"] = x.terms_BHLS.defined();
    context->saved_data["noise"] = noise.integers();
    context->saved_data["dropout"] = static_cast<double>(in.dropout);
    if (alpha_H.defined()) context->saved_data["alpha"] = alpha_H.scalar_type();
    return x.out_BHLD;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list t = context->get_saved_variables();
    std::optional<NoiseKey> noise;
    if (t[10].defined()) {
      noise = NoiseKey::of_integers(context->saved_data["noise"].toIntVector(), t[10], t[11]);
    }
    RowTensors x;
    x.q_BHLD = t[0];
    x.k_BHSD = t[1];
    x.v_BHSD = t[2];
    x.terms_BHLS = t[12];
    const auto alpha = context->saved_data.find("alpha");
    variable_list result = gradients_of(
        x, {t[3], t[4], t[5], t[6], t[7], t[8], t[9]},
        static_cast<float>(context->saved_data["dropout"].toDouble()), noise, gradients[0],
        alpha == context->saved_data.end() ? std::nullopt
                                           : std::optional(alpha->second.toScalarType()),
        context->saved_data["has_terms"].toBool());
    result.emplace_back();  // none for `in`
    return result;
  }

 private:
  static void run(RowTensors x, const SavedRows& saved, float p,
                  const std::optional<NoiseKey>& noise, double* d_alpha_BH, bool forward) {
    const std::int64_t H = x.q_BHLD.size(1);
    const std::optional<TileDropout> dropout =
        tile_dropout(p, noise, x.q_BHLD.size(0), x.k_BHSD.size(2));
    if (dropout) x.set_noise(*noise);
    const HeadShape shape = head_shape(x, 1 / std::sqrt(static_cast<double>(x.q_BHLD.size(3))),
                                       dropout ? &*dropout : nullptr);
    const auto of_sequence = [](const at::Tensor& x_BL, std::int64_t b) {
      return x_BL.const_data_ptr<std::int32_t>() + b * x_BL.stride(0);
    };
    dispatch_tile_type(x.q_BHLD.scalar_type(), [&](auto type) {
      using T = decltype(type);
      const auto set_row = [&](RowHead<T>& head, std::int64_t b, std::int64_t h) {
        head.first = of_sequence(saved.first_BL, b);
        head.end = of_sequence(saved.end_BL, b);
        head.terms = terms_of_pairs<const Sum<T>>(x.terms_BHLS, b, h);
        head.d_terms = terms_of_pairs<Sum<T>>(x.d_terms_BHLS, b, h);
      };
      const RowKernels<T>& kernels = row_kernels<T>(instruction_set());
      if (saved.kept_BL.defined()) {
        const TopKShape lists{shape, static_cast<int>(saved.index_BHLk.size(3))};
        for_heads<T, TopKHead<T>>(
            x, kernels.top_k_scratch_bytes(lists),
            [&](TopKHead<T>& head, std::int64_t b, std::int64_t h, void* scratch) {
              set_row(head, b, h);
              head.kept = of_sequence(saved.kept_BL, b);
              const std::int64_t offset =
                  b * saved.index_BHLk.stride(0) + h * saved.index_BHLk.stride(1);
              head.index = saved.index_BHLk.mutable_data_ptr<std::int32_t>() + offset;
              head.weight = static_cast<Sum<T>*>(saved.weight_BHLk.mutable_data_ptr()) + offset;
              (forward ? kernels.top_k_forward : kernels.top_k_backward)(lists, head, scratch);
            });
        return;
      }
      for_heads<T, EntmaxHead<T>>(
          x, kernels.entmax_scratch_bytes(shape),
          [&](EntmaxHead<T>& head, std::int64_t b, std::int64_t h, void* scratch) {
            set_row(head, b, h);
            head.alpha = static_cast<Sum<T>>(saved.alpha_H.const_data_ptr<double>()[h]);
            head.threshold = static_cast<Sum<T>*>(saved.threshold_BHL.mutable_data_ptr()) +
                             b * saved.threshold_BHL.stride(0) + h * saved.threshold_BHL.stride(1);
            if (d_alpha_BH != nullptr) head.d_alpha = d_alpha_BH + b * H + h;
            (forward ? kernels.entmax_forward : kernels.entmax_backward)(shape, head, scratch);
          });
    });
  }
};

}  // namespace

std::string why_not_row_kernels(const RowAttention& in) {
  if (in.normalizer.kind == Normalizer::kTopK) {
    if (in.normalizer.keep_ties) return "the kernel for top_k keeps no ties";
    if (const std::int64_t kept = max_kept(in); kept > kMaxKeptKeys) {
      return fmt::format("a query keeps {} keys, more than {}", kept, kMaxKeptKeys);
    }
  }
  return why_not_fused(
      in.q_BHLD, [&] { return why_not_tiles(in.q_BHLD.scalar_type(), in.q_BHLD.size(3)); },
      [&] { return why_not_gpu_rows(in); });
}

at::Tensor attend_rows(RowAttention in) {
  const std::int64_t H = in.q_BHLD.size(1);
  in.k_BHSD = to_query_heads(in.k_BHSD, H);
  in.v_BHSD = to_query_heads(in.v_BHSD, H);
  std::vector<at::Tensor> others;
  for (const at::Tensor& x : {in.normalizer.alpha_H, in.distance_terms_BHLS}) {
    if (x.defined()) others.push_back(x);
  }
  return FusedRows::apply(in.q_BHLD, in.k_BHSD, in.v_BHSD, at::TensorList(others), in);
}

RowResults fused_forward(const RowAttention& in) {
  const auto [x, saved] = FusedRows::attend(in);
  return {x.out_BHLD, saved.index_BHLk, saved.weight_BHLk, saved.threshold_BHL};
}

std::vector<at::Tensor> fused_backward(const RowAttention& in, const RowResults& results,
                                       const at::Tensor& d_out_BHLD, bool learns_alpha) {
  RowTensors x;
  x.q_BHLD = with_fitting_rows(in.q_BHLD);
  x.k_BHSD = with_fitting_rows(in.k_BHSD);
  x.v_BHSD = with_fitting_rows(in.v_BHSD);
  x.terms_BHLS = in.distance_terms_BHLS;
  SavedRows saved = new_saved_rows(in);
  saved.index_BHLk = results.index_BHLk;
  saved.weight_BHLk = results.weight_BHLk;
  saved.threshold_BHL = results.threshold_BHL;
  const auto learned =
      learns_alpha ? std::optional(in.normalizer.alpha_H.scalar_type()) : std::nullopt;
  return FusedRows::gradients_of(x, saved, in.dropout, in.noise, d_out_BHLD, learned,
                                 x.terms_BHLS.defined());
}

at::Tensor reference_rows(const RowAttention& in, const at::Tensor& mask,
                          const at::Tensor& sink_H) {
  const std::int64_t H = in.q_BHLD.size(1);
  at::Tensor q_BHLD = in.q_BHLD, k_BHSD = to_query_heads(in.k_BHSD, H);
  const at::Tensor& terms_BHLS = in.distance_terms_BHLS;
  // Rounded scores would be equal often, and terms of distances are wide.
  if (in.normalizer.kind != Normalizer::kSoftmax || terms_BHLS.defined()) {
    const at::ScalarType type = at::toOpMathType(q_BHLD.scalar_type());
    q_BHLD = q_BHLD.to(type);
    k_BHSD = k_BHSD.to(type);
  }
  at::Tensor scores_BHLS = at::matmul(q_BHLD, k_BHSD.transpose(-1, -2));
  if (terms_BHLS.defined()) scores_BHLS = scores_BHLS + to_keys(terms_BHLS);
  scores_BHLS = scores_BHLS * (1 / std::sqrt(static_cast<double>(q_BHLD.size(3))));
  const at::Tensor p_BHLS =
      drop_probabilities(normalize_rows(in.normalizer, scores_BHLS, mask, sink_H), in.dropout,
                         in.noise)
          .to(in.v_BHSD.scalar_type());
  return at::matmul(p_BHLS, to_query_heads(in.v_BHSD, H));
}

void set_key_ranges(RowAttention& in, bool causal, const at::Tensor& key_lengths_B,
                    const at::Tensor& segments_q_BL, const at::Tensor& segments_kv_BS) {
  const std::int64_t L = in.q_BHLD.size(2), S = in.k_BHSD.size(2);
  const auto indices = in.q_BHLD.options().dtype(at::kInt);
  in.first_BL = at::zeros({1, L}, indices);
  if (causal) {
    in.end_BL = at::arange(S - L + 1, S + 1, indices).unsqueeze(0);
  } else {
    in.end_BL = at::full({1, L}, S, indices);
  }
  if (key_lengths_B.defined()) {
    in.end_BL = in.end_BL.minimum(key_lengths_B.to(at::kInt).unsqueeze(1));
  }
  if (!segments_q_BL.defined()) return;
  const auto bound = [&](bool right) {
    return at::searchsorted(segments_kv_BS.contiguous(), segments_q_BL.contiguous(),
                            /*out_int32=*/true, right);
  };
  in.first_BL = bound(false);
  in.end_BL = in.end_BL.minimum(bound(true));
}

}  // namespace birkhoff
