// Legend: B batch, H heads, L queries, S keys, D head dim.
#include "attention/kernels/sinkformer/sinkformer.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <utility>
#include <vector>

#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_sets.h"
#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/masked_softmax.h"
#include "attention/kernels/sinkformer/gpu_arguments.h"
#include "attention/kernels/tile_attention/cpu_heads.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {

template <typename T>
const SinkformerKernels<T>& sinkformer_kernels(InstructionSet set) {
  return for_set(set, []<InstructionSet kSet>() -> const SinkformerKernels<T>& {
    return compiled_sinkformer_kernels<kSetOf<kSet, false>, T>();
  });
}
template const SinkformerKernels<float>& sinkformer_kernels(InstructionSet);
template const SinkformerKernels<double>& sinkformer_kernels(InstructionSet);
template const SinkformerKernels<Bf16>& sinkformer_kernels(InstructionSet);

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kHidden = -1e30;

// bool [B, 1, L or 1, S or 1]: pairs that exist, in the same document. Undefined: all.
at::Tensor visible_pairs(const DoublyStochasticAttention& in) {
  const auto exist = [](const at::Tensor& lengths_B, std::int64_t size) {
    return at::arange(size, lengths_B.options()) < lengths_B.unsqueeze(1);
  };
  at::Tensor visible;
  if (in.query_lengths_B.defined()) {
    visible = exist(in.query_lengths_B, in.q_BHLD.size(2)).unsqueeze(1).unsqueeze(3);
  }
  if (in.key_lengths_B.defined()) {
    const at::Tensor keys_BS = exist(in.key_lengths_B, in.k_BHSD.size(2));
    visible = and_defined(visible, keys_BS.unsqueeze(1).unsqueeze(2));
  }
  return in.same_document_BLS.defined() ? and_defined(visible, in.same_document_BLS.unsqueeze(1))
                                        : visible;
}

// The identity, whose gradient G becomes G_ij - [x_j - (P x)_i], where x solves the equation of
// cpu_sinkformer.h: the implicit gradient, given that autograd adds that of the last row step.
struct ImplicitColumns : torch::autograd::Function<ImplicitColumns> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& g_BH1S,
                            const at::Tensor& scores_BHLS, const at::Tensor& f_BHL1) {
    context->save_for_backward({(scores_BHLS + g_BH1S + f_BHL1).exp()});
    return g_BH1S.clone();
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const at::Tensor p_BHLS = context->get_saved_variables()[0],
                     laplacian =
                         at::diag_embed(p_BHLS.sum(2)) - at::matmul(p_BHLS.transpose(2, 3), p_BHLS),
                     inverse = at::linalg_pinv(laplacian.nan_to_num(), std::optional<double>(),
                                               std::optional<double>(),
                                               /*hermitian=*/true),
                     x_BHS1 = at::matmul(inverse, gradients[0].transpose(2, 3));
    return {at::Tensor(), p_BHLS * (at::matmul(p_BHLS, x_BHS1) - x_BHS1.transpose(2, 3)),
            at::Tensor()};
  }
};

// Potentials are compared in fp32 or wider, whatever the inputs' dtype.
at::Tensor reference(const DoublyStochasticAttention& in) {
  const auto dtype = in.q_BHLD.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const std::int64_t H = in.q_BHLD.size(1), L = in.q_BHLD.size(2), S = in.k_BHSD.size(2);
  const at::Tensor k_BHSD = to_query_heads(in.k_BHSD, H).to(dtype);
  at::Tensor scores_BHLS = at::matmul(in.q_BHLD.to(dtype), k_BHSD.transpose(2, 3)) *
                           (1 / std::sqrt(static_cast<double>(in.q_BHLD.size(3))));
  const at::Tensor visible = visible_pairs(in);
  at::Tensor log_mass_BH1S;  // n / m of the document
  at::Tensor keyless_B1L1;   // queries without a key
  if (visible.defined()) {
    const at::Tensor pairs_B1LS = visible.expand({in.q_BHLD.size(0), 1, L, S});
    scores_BHLS = scores_BHLS.masked_fill(pairs_B1LS.logical_not(), kHidden);
    const at::Tensor keys_B1L1 = pairs_B1LS.sum(3, /*keepdim=*/true);
    keyless_B1L1 = keys_B1L1 == 0;
    log_mass_BH1S = (pairs_B1LS / keys_B1L1.clamp_min(1)).to(dtype).sum(2, /*keepdim=*/true).log();
    // Columns without a query have any potential.
    log_mass_BH1S = log_mass_BH1S.masked_fill(log_mass_BH1S.isinf(), kHidden);
  } else {
    log_mass_BH1S =
        at::full({1, 1, 1, 1}, std::log(static_cast<double>(L) / static_cast<double>(S)),
                 scores_BHLS.options());
  }
  const auto row_step = [&](const at::Tensor& s_BHLS) {
    const at::Tensor f_BHL1 = -s_BHLS.logsumexp(3, /*keepdim=*/true);
    return keyless_B1L1.defined() ? f_BHL1.masked_fill(keyless_B1L1, 0) : f_BHL1;
  };
  at::Tensor f_BHL1 = row_step(scores_BHLS), g_BH1S;
  {
    const bool differentiates =
        at::GradMode::is_enabled() && in.gradient == BalanceGradient::kUnrolled;
    const at::AutoGradMode mode(differentiates);
    for (int t = 2; t < in.half_steps; t += 2) {
      g_BH1S = log_mass_BH1S - (scores_BHLS + f_BHL1).logsumexp(2, /*keepdim=*/true);
      f_BHL1 = row_step(scores_BHLS + g_BH1S);
    }
  }
  if (g_BH1S.defined()) {
    if (in.gradient == BalanceGradient::kImplicit && scores_BHLS.requires_grad()) {
      g_BH1S = ImplicitColumns::apply(g_BH1S, scores_BHLS, f_BHL1.detach());
    }
    scores_BHLS = scores_BHLS + g_BH1S;
  }
  const at::Tensor p_BHLS =
      drop_probabilities(masked_softmax(scores_BHLS, visible), in.dropout, in.noise);
  return at::matmul(p_BHLS, to_query_heads(in.v_BHSD, H).to(dtype)).to(in.q_BHLD.scalar_type());
}

struct FusedSinkformer : torch::autograd::Function<FusedSinkformer> {
  struct Options {
    int half_steps;
    BalanceGradient gradient;
    float dropout;
    std::optional<NoiseKey> noise;
  };
  // What the backward pass reads besides its inputs; exact_out is undefined without a backward pass
  // and on a GPU.
  struct Saved {
    at::Tensor exact_out_BHLD;
    SinkformerVectors potentials;
  };

  // The forward pass; exact_out is saved if `saves`.
  static std::pair<HeadTensors, Saved> attend(const DoublyStochasticAttention& in, bool saves) {
    const at::Tensor &q_BHLD = in.q_BHLD, &k_BHSD = in.k_BHSD, &v_BHSD = in.v_BHSD;
    HeadTensors x;
    x.q_BHLD = with_fitting_rows(q_BHLD);
    x.k_BHSD = with_fitting_rows(k_BHSD);
    x.v_BHSD = with_fitting_rows(v_BHSD);
    x.out_BHLD = at::zeros_like(x.q_BHLD);  // stays 0 in padding
    x.query_lengths_B = in.query_lengths_B;
    x.key_lengths_B = in.key_lengths_B;
    const Saved saved = q_BHLD.is_cuda() ? Saved{{}, new_sinkformer_vectors(x, in.half_steps)}
                                         : new_saved_on_cpu(x, in.half_steps, saves);
    const Options options{in.half_steps, in.gradient, in.dropout, in.noise};
    run(options, x, saved, /*forward=*/true);
    return {x, saved};
  }

  // The gradients of q, k and v of x.
  static variable_list gradients_of(const Options& options, HeadTensors x, const Saved& saved,
                                    const at::Tensor& d_out_BHLD) {
    x.d_out_BHLD = with_fitting_rows(d_out_BHLD);
    x.d_q_BHLD = at::zeros_like(x.q_BHLD);
    x.d_k_BHSD = at::zeros_like(x.k_BHSD);
    x.d_v_BHSD = at::zeros_like(x.v_BHSD);
    run(options, x, saved, /*forward=*/false);
    return {x.d_q_BHLD, x.d_k_BHSD, x.d_v_BHSD};
  }

  // `in` holds the tensors again, with everything else.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q_BHLD,
                            const at::Tensor& k_BHSD, const at::Tensor& v_BHSD,
                            const DoublyStochasticAttention& in) {
    const bool saves = q_BHLD.requires_grad() || k_BHSD.requires_grad() || v_BHSD.requires_grad();
    const NoiseKey noise = in.noise.value_or(NoiseKey{});
    const auto [x, saved] = attend(in, saves);
    context->save_for_backward({x.q_BHLD, x.k_BHSD, x.v_BHSD, x.query_lengths_B, x.key_lengths_B,
                                saved.exact_out_BHLD, saved.potentials.queries_BHtL,
                                saved.potentials.keys_BHtS, noise.step, noise.sample_ids_B});
    context->saved_data["options"] =
        std::vector<std::int64_t>{in.half_steps, static_cast<std::int64_t>(in.gradient)};
    context->saved_data["noise"] = noise.integers();
    context->saved_data["dropout"] = static_cast<double>(in.dropout);
    return x.out_BHLD;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list tensors = context->get_saved_variables();
    const std::vector<std::int64_t> numbers = context->saved_data["options"].toIntVector();
    Options options{static_cast<int>(numbers[0]), static_cast<BalanceGradient>(numbers[1]),
                    static_cast<float>(context->saved_data["dropout"].toDouble()), std::nullopt};
    if (tensors[8].defined()) {
      options.noise =
          NoiseKey::of_integers(context->saved_data["noise"].toIntVector(), tensors[8], tensors[9]);
    }
    HeadTensors x;
    x.q_BHLD = tensors[0];
    x.k_BHSD = tensors[1];
    x.v_BHSD = tensors[2];
    x.query_lengths_B = tensors[3];
    x.key_lengths_B = tensors[4];
    variable_list result =
        gradients_of(options, x, {tensors[5], {tensors[6], tensors[7]}}, gradients[0]);
    result.emplace_back();  // none for `in`
    return result;
  }

 private:
  static Saved new_saved_on_cpu(const HeadTensors& x, int half_steps, bool saves_out) {
    const at::Tensor &q = x.q_BHLD, &k = x.k_BHSD;
    const auto sums = [&](at::IntArrayRef sizes) {
      return at::zeros(sizes, q.options().dtype(at::toOpMathType(q.scalar_type())));
    };
    return {saves_out ? sums(q.sizes()) : at::Tensor(),
            {sums({q.size(0), q.size(1), half_steps / 2 + 1, q.size(2)}),
             sums({k.size(0), k.size(1), half_steps / 2, k.size(2)})}};
  }

  static void run(const Options& options, const HeadTensors& x, const Saved& saved, bool forward) {
    if (x.q_BHLD.is_cpu()) {
      run_on_cpu(options, x, saved, forward);
    } else if constexpr (kHasGpuKernels) {
      run_on_gpu(options, x, saved, forward);
    }
  }

  static void run_on_gpu(const Options& options, const HeadTensors& x, const Saved& saved,
                         bool forward) {
    if (forward) {
      launch_sinkformer(sinkformer_params(x, options.half_steps, saved.potentials),
                        current_stream(x.q_BHLD));
      return;
    }
    launch_sinkformer_backward(sinkformer_params(x, options.half_steps, saved.potentials,
                                                 options.gradient == BalanceGradient::kUnrolled,
                                                 new_sinkformer_vectors(x, options.half_steps)),
                               current_stream(x.q_BHLD));
  }

  static void run_on_cpu(const Options& options, HeadTensors x, const Saved& saved, bool forward) {
    const std::optional<TileDropout> dropout =
        tile_dropout(options.dropout, options.noise, x.q_BHLD.size(0), x.k_BHSD.size(2));
    if (dropout) x.set_noise(*options.noise);
    SinkformerShape shape{head_shape(x, 1 / std::sqrt(static_cast<double>(x.q_BHLD.size(3))),
                                     dropout ? &*dropout : nullptr),
                          options.half_steps, options.gradient};
    dispatch_tile_type(x.q_BHLD.scalar_type(), [&](auto type) {
      using T = decltype(type);
      const SinkformerKernels<T>& kernels = sinkformer_kernels<T>(instruction_set());
      for_heads<T, SinkformerHead<T>>(
          x, kernels.scratch_bytes(shape),
          [&](SinkformerHead<T>& head, std::int64_t b, std::int64_t h, void* scratch) {
            const auto of_head = [&](const at::Tensor& each) -> Sum<T>* {
              if (!each.defined() || each.numel() == 0) return nullptr;
              return static_cast<Sum<T>*>(each.mutable_data_ptr()) + b * each.stride(0) +
                     h * each.stride(1);
            };
            head.row_potentials = of_head(saved.potentials.queries_BHtL);
            head.column_potentials = of_head(saved.potentials.keys_BHtS);
            head.exact_out = of_head(saved.exact_out_BHLD);
            (forward ? kernels.forward : kernels.backward)(shape, head, scratch);
          });
    });
  }
};

std::string why_not_cpu_kernel(const DoublyStochasticAttention& in) {
  if (in.same_document_BLS.defined()) return "each document is balanced on its own";
  return why_not_tiles(in.q_BHLD.scalar_type(), in.q_BHLD.size(3));
}

}  // namespace

PathChoice choose_path(const DoublyStochasticAttention& in, Path limit) {
  if (limit != Path::kFused) return {Path::kReference};
  return fused_unless(why_not_fused(
      in.q_BHLD, [&] { return why_not_cpu_kernel(in); }, [&] { return why_not_gpu_kernels(in); }));
}

at::Tensor attend_doubly_stochastic(DoublyStochasticAttention in, Path limit) {
  require(
      in.half_steps > 0 && in.half_steps % 2 == 1 && in.half_steps <= kMaxHalfSteps,
      "doubly stochastic attention: half-steps must be odd, so that rows sum to 1, and at most 999");
  if (take_path("doubly stochastic attention", choose_path(in, limit)) == Path::kReference) {
    return reference(in);
  }
  const std::int64_t H = in.q_BHLD.size(1);
  in.k_BHSD = to_query_heads(in.k_BHSD, H);
  in.v_BHSD = to_query_heads(in.v_BHSD, H);
  return FusedSinkformer::apply(in.q_BHLD, in.k_BHSD, in.v_BHSD, in);
}

SinkformerResults fused_forward(const DoublyStochasticAttention& in) {
  const auto [x, saved] = FusedSinkformer::attend(in, /*saves=*/true);
  return {x.out_BHLD, saved.exact_out_BHLD, saved.potentials.queries_BHtL,
          saved.potentials.keys_BHtS};
}

std::vector<at::Tensor> fused_backward(const DoublyStochasticAttention& in,
                                       const SinkformerResults& results,
                                       const at::Tensor& d_out_BHLD) {
  HeadTensors x;
  x.q_BHLD = with_fitting_rows(in.q_BHLD);
  x.k_BHSD = with_fitting_rows(in.k_BHSD);
  x.v_BHSD = with_fitting_rows(in.v_BHSD);
  x.query_lengths_B = in.query_lengths_B;
  x.key_lengths_B = in.key_lengths_B;
  return FusedSinkformer::gradients_of(
      {in.half_steps, in.gradient, in.dropout, in.noise}, x,
      {results.exact_out_BHLD, {results.rows_BHtL, results.columns_BHtS}}, d_out_BHLD);
}

}  // namespace birkhoff
