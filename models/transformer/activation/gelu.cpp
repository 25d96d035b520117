#include "models/transformer/activation/activation.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <torch/csrc/autograd/custom_function.h>

#include "cluster/base/instruction_set.h"
#include "cluster/base/tensors/second_gradient.h"
#include "models/transformer/activation/cpu_gelu.h"

namespace birkhoff {

#if defined(__x86_64__)

namespace {

// Returns a new tensor like x. f(kernels, begin, n, out) computes n of its elements; parts run in
// parallel.
template <typename F>
at::Tensor computed(const at::Tensor& x, F f) {
  constexpr std::int64_t kGrain = 1 << 15;  // elements that are worth a thread
  at::Tensor out = at::empty_like(x);
  const auto run = [&](auto number) {
    using T = decltype(number);
    T* data = static_cast<T*>(out.mutable_data_ptr());
    at::parallel_for(0, x.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      f(gelu_kernels<T>(), begin, static_cast<std::size_t>(end - begin), data + begin);
    });
  };
  if (x.scalar_type() == at::kFloat) {
    run(float{});
  } else {
    run(Bf16{});
  }
  return out;
}

template <typename T>
const T* elements(const at::Tensor& x, std::int64_t begin, T*) {
  return static_cast<const T*>(x.const_data_ptr()) + begin;
}

class Gelu : public torch::autograd::Function<Gelu> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return computed(x, [&](const auto& kernels, std::int64_t begin, std::size_t n, auto* y) {
      kernels.forward(elements(x, begin, y), n, y);
    });
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list d_ys) {
    refuse_second_gradient();
    const at::Tensor x = context->get_saved_variables()[0], d_y = d_ys[0].contiguous();
    return {computed(x, [&](const auto& kernels, std::int64_t begin, std::size_t n, auto* d_x) {
      kernels.backward(elements(x, begin, d_x), elements(d_y, begin, d_x), n, d_x);
    })};
  }
};

}  // namespace

at::Tensor gelu(const at::Tensor& x) {
  const bool has_type = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  const bool fits = x.is_cpu() && x.is_contiguous() && has_type;
  return fits && instruction_set() >= InstructionSet::kAvx512Bf16 ? Gelu::apply(x) : at::gelu(x);
}

#else

at::Tensor gelu(const at::Tensor& x) { return at::gelu(x); }

#endif

}  // namespace birkhoff
