// What the files that register operators share.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <optional>
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

// An input that a call does not have (calls.h).
inline at::Tensor none_like(const at::Tensor& q) { return at::empty({0}, q.options()); }

// The inputs q, k, v and the terms of their logits.
inline std::vector<at::Tensor> with_terms(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const OptionalTensor& relative_keys,
                                          const OptionalTensor& relative_values,
                                          const OptionalTensor& sink) {
  const auto term = [&](const OptionalTensor& x) { return x ? *x : none_like(q); };
  return {q, k, v, term(relative_keys), term(relative_values), term(sink)};
}

}  // namespace birkhoff::ops
