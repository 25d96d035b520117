#include "attention/pytorch/differentiate.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

namespace birkhoff::ops {

Tensors differentiate(const std::function<Differentiated(const Tensors&)>& run,
                      at::TensorList inputs) {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const c10::impl::ForceDispatchKeyGuard with_autograd(keys);
  const c10::AutoGradMode with_gradients(true);
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().requires_grad_(true));
  const Differentiated made = run(leaves);
  Tensors gradients =
      torch::autograd::grad(made.values, leaves, made.gradients, /*retain_graph=*/std::nullopt,
                            /*create_graph=*/false, /*allow_unused=*/true);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    gradients[i] =
        gradients[i].defined() ? laid_out_as(inputs[i], gradients[i]) : no_gradient(inputs[i]);
  }
  return gradients;
}

at::Tensor no_gradient(const at::Tensor& input) {
  return is_none(input) ? at::empty_like(input) : at::zeros_like(input);
}

at::Tensor laid_out_as(const at::Tensor& model, const at::Tensor& x) {
  // What at::empty_like would find, without its cost.
  if (x.strides() == model.strides() && model.is_non_overlapping_and_dense()) return x;
  const at::Tensor result = at::empty_like(model);
  return result.strides() == x.strides() ? x : result.copy_(x);
}

void check_given(at::TensorList given, const std::vector<Expected>& expected) {
  TORCH_CHECK_VALUE(given.size() == expected.size(), "birkhoff: a backward pass needs ",
                    expected.size(), " tensors from ", expected.front().name, " on, not ",
                    given.size());
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto& [name, dtype, sizes] = expected[i];
    TORCH_CHECK_VALUE(given[i].scalar_type() == dtype && given[i].sizes() == sizes,
                      "birkhoff: ", name, " must be ", dtype, " ", at::IntArrayRef(sizes), ", not ",
                      given[i].scalar_type(), " ", given[i].sizes());
  }
}

std::optional<NoiseKey> noise_of(double dropout, const std::optional<at::Tensor>& seed,
                                 const at::Tensor& q) {
  if (static_cast<float>(dropout) == 0) return std::nullopt;
  return NoiseKey{.step = *seed, .sample_ids_B = at::arange(q.size(0), seed->options())};
}

GivenTerms terms_of(at::TensorList inputs, bool causal) {
  const auto term = [&](Input which) { return has(inputs, which) ? inputs[which] : at::Tensor(); };
  GivenTerms terms{
      .relative = {.keys_HRD = term(kRelativeKeys), .values_HRD = term(kRelativeValues)},
      .sink_H = term(kSink)};
  if (terms.relative.defined()) {
    const std::int64_t R = terms.relative.num_distances();
    terms.relative.least = causal ? 1 - R : (1 - R) / 2;
  }
  return terms;
}

}  // namespace birkhoff::ops
