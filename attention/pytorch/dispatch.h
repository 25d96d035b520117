// Common parts of the files that register operators.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/pytorch/calls.h"

namespace birkhoff::ops {

// Finds a registered operator, given the type of the kernel that implements it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const std::string& name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("birkhoff::" + name).c_str(), "")
      .typed<Signature>();
}

// ---- Operators with a gradient.

// How the options of an operator are kept for its backward pass: tensors as autograd's variables,
// others as values.
inline void keep(const at::Tensor& x, Tensors& tensors, std::vector<c10::IValue>& /*values*/) {
  tensors.push_back(x);
}
inline void keep(const OptionalTensor& x, Tensors& tensors, std::vector<c10::IValue>& /*values*/) {
  tensors.push_back(x.value_or(at::Tensor()));
}
template <typename Option>
void keep(Option x, Tensors& /*tensors*/, std::vector<c10::IValue>& values) {
  values.emplace_back(x);
}
// Returns the next option as it was kept; strings live as long as the values.
template <typename Option>
Option kept(Tensors::const_iterator& tensor, std::vector<c10::IValue>::const_iterator& value) {
  if constexpr (std::is_same_v<Option, at::Tensor>) {
    return *tensor++;
  } else if constexpr (std::is_same_v<Option, OptionalTensor>) {
    const at::Tensor& x = *tensor++;
    return x.defined() ? OptionalTensor(x) : std::nullopt;
  } else if constexpr (std::is_same_v<Option, std::string_view>) {
    return (value++)->toStringView();
  } else {
    return (value++)->to<Option>();
  }
}

// An operator whose gradient is an operator, too, so that compiled graphs hold both passes. Op (see
// calls.h) also has kName, and kOptions, the schema of its members, whose types are `Options`. The
// gradient's name ends with "_backward".
template <typename Op, typename... Options>
struct WithGradient : torch::autograd::Function<WithGradient<Op, Options...>> {
  using Context = torch::autograd::AutogradContext;

  // The forward pass through the dispatcher.
  static Tensors call(at::TensorList inputs, Options... options) {
    static const auto op = find<Tensors(at::TensorList, Options...)>(Op::kName);
    return op.call(inputs, options...);
  }

  static Tensors forward(Context* context, at::TensorList inputs, Options... options) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensors results = call(inputs, options...);
    Tensors tensors(inputs.begin(), inputs.end());
    std::vector<c10::IValue> values;
    (keep(options, tensors, values), ...);
    tensors.insert(tensors.end(), results.begin() + Op::kFirstSaved, results.end());
    context->save_for_backward(std::move(tensors));
    context->saved_data["inputs"] = static_cast<std::int64_t>(inputs.size());
    context->saved_data["options"] = c10::ivalue::Tuple::create(std::move(values));
    context->mark_non_differentiable({results.begin() + Op::kOutputs, results.end()});
    // With one output, zeros for gradients that do not exist would not be read.
    if (Op::kOutputs == 1) context->set_materialize_grads(false);
    return results;
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    static const auto op =
        find<Tensors(at::TensorList, at::TensorList, at::TensorList, Options...)>(
            std::string(Op::kName) + "_backward");
    const Tensors tensors = context->get_saved_variables();
    const auto num_inputs = static_cast<std::size_t>(context->saved_data["inputs"].toInt());
    constexpr std::size_t kNumOptions = sizeof...(Options);
    if (Op::kOutputs == 1 && !gradients[0].defined()) return Tensors(num_inputs + kNumOptions);
    const std::vector<c10::IValue> values =
        context->saved_data["options"].toTupleRef().elements().vec();
    auto tensor = tensors.cbegin() + static_cast<std::ptrdiff_t>(num_inputs);
    auto value = values.cbegin();
    const std::tuple<std::decay_t<Options>...> options{
        kept<std::decay_t<Options>>(tensor, value)...};  // in order
    Tensors result = std::apply(
        [&](const auto&... each) {
          return op.call(at::TensorList(gradients).slice(0, Op::kOutputs),
                         at::TensorList(tensors).slice(0, num_inputs),
                         Tensors(tensor, tensors.cend()), each...);
        },
        options);
    result.resize(num_inputs + kNumOptions);  // none for options
    return result;
  }

  // Registers both passes.
  static void define(torch::Library& library) {
    const std::string name = Op::kName, backward = name + "_backward";
    const auto schema = [&](const std::string& text) {
      library.def((text + Op::kOptions + ") -> Tensor[]").c_str(), {at::Tag::pt2_compliant_tag});
    };
    schema(name + "(Tensor[] inputs, ");
    schema(backward + "(Tensor[] gradients, Tensor[] inputs, Tensor[] saved, ");
    for (const auto device : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
      library.impl(name.c_str(), torch::dispatch(
                                     device, +[](at::TensorList inputs, Options... options) {
                                       return Op{options...}.forward(inputs);
                                     }));
      library.impl(backward.c_str(),
                   torch::dispatch(
                       device, +[](at::TensorList gradients, at::TensorList inputs,
                                   at::TensorList saved, Options... options) {
                         return Op{options...}.backward(gradients, inputs, saved);
                       }));
    }
    library.impl(name.c_str(),
                 torch::dispatch(
                     c10::DispatchKey::Meta, +[](at::TensorList inputs, Options... options) {
                       return Op{options...}.meta(inputs);
                     }));
    library.impl(backward.c_str(),
                 torch::dispatch(
                     c10::DispatchKey::Meta,
                     +[](at::TensorList, at::TensorList inputs, at::TensorList, Options...) {
                       Tensors gradients;
                       for (const at::Tensor& x : inputs) {
                         gradients.push_back(at::empty_like(x));
                       }
                       return gradients;
                     }));
    library.impl(name.c_str(),
                 torch::dispatch(
                     c10::DispatchKey::Autograd, +[](at::TensorList inputs, Options... options) {
                       return WithGradient::apply(inputs, options...);
                     }));
    // There are no second gradients: asking for one is an error that says so.
    library.impl(backward.c_str(),
                 torch::dispatch(c10::DispatchKey::Autograd,
                                 torch::autograd::autogradNotImplementedFallback()));
  }
};

// ---- Arguments.

// Returns an argument as calls take it: a tensor of sizes [0] stands for None (calls.h), so users
// must not pass one.
inline at::Tensor or_none(const char* name, const OptionalTensor& x, const at::Tensor& q) {
  if (!x) return at::empty({0}, q.options());
  TORCH_CHECK_VALUE(!is_none(*x), "birkhoff: ", name, " is empty; leave it out, or pass None");
  return *x;
}

// The inputs q, k, v and the terms of their logits, which block weights may follow.
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
// The same, without terms if there are none: a call costs the host less.
inline std::vector<at::Tensor> with_given_terms(const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v,
                                                const OptionalTensor& relative_keys,
                                                const OptionalTensor& relative_values,
                                                const OptionalTensor& sink) {
  if (!relative_keys && !relative_values && !sink) return {q, k, v};
  return with_terms(q, k, v, relative_keys, relative_values, sink);
}

}  // namespace birkhoff::ops
