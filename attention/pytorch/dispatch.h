// Common parts of the files that register operators.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>
#include <tuple>
#include <vector>

#include "attention/pytorch/calls.h"

namespace birkhoff::ops {

using OptionalTensor = std::optional<at::Tensor>;

// Finds a registered operator, given the type of the kernel that implements it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline OptionalTensor if_defined(const at::Tensor& x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}

// The kernel of an operator with the gradient that Function defines.
template <typename Function, typename... Results, typename... Arguments>
auto with_gradient(std::tuple<Results...> (*)(Arguments...)) {
  return +[](Arguments... arguments) {
    const std::vector<at::Tensor> results = Function::apply(arguments...);
    auto next = results.begin();
    return std::tuple<Results...>{Results(*next++)...};
  };
}
template <typename Function, typename... Arguments>
auto with_gradient(at::Tensor (*)(Arguments...)) {
  return +[](Arguments... arguments) -> at::Tensor { return Function::apply(arguments...); };
}

// The meta function of a backward pass: gradients like the inputs, its only list of tensors.
template <typename... Arguments>
auto gradients_meta(std::vector<at::Tensor> (*)(Arguments...)) {
  return +[](Arguments... arguments) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& input : std::get<at::TensorList&>(std::tie(arguments...))) {
      gradients.push_back(at::empty_like(input));
    }
    return gradients;
  };
}

// Returns an argument as calls take it: a tensor of sizes [0] stands for None (calls.h), so users
// must not pass one.
inline at::Tensor or_none(const char* name, const OptionalTensor& x, const at::Tensor& q) {
  if (!x) return at::empty({0}, q.options());
  TORCH_CHECK_VALUE(!is_none(*x), "birkhoff: ", name, " is empty; leave it out, or pass None");
  return *x;
}

// The inputs q, k, v and the terms of their logits.
inline std::vector<at::Tensor> with_terms(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const OptionalTensor& relative_keys,
                                          const OptionalTensor& relative_values,
                                          const OptionalTensor& sink) {
  return {q,
          k,
          v,
          or_none("relative_keys", relative_keys, q),
          or_none("relative_values", relative_values, q),
          or_none("sink", sink, q)};
}

}  // namespace birkhoff::ops
