// The operators that docs/pytorch.md documents, registered with PyTorch's dispatcher when this
// library is loaded. Those without an underscore are for users; they are compositions of the
// others, which have a kernel (kernels.h), a meta function for tracing and torch.compile, and a
// gradient that is an operator too, so that compiled graphs hold both passes.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <tuple>

#include "attention/ops/kernels.h"

namespace birkhoff::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// A registered operator, by the type of the kernel that implements it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// ---- Two passes of each operator through the dispatcher.

const auto& block_local_forward_op() {
  static const auto op = find<decltype(block_local_attention)>("birkhoff::_block_local_attention");
  return op;
}
const auto& block_local_backward_op() {
  static const auto op =
      find<decltype(block_local_attention_backward)>("birkhoff::_block_local_attention_backward");
  return op;
}
const auto& sorted_forward_op() {
  static const auto op = find<decltype(sorted_attention)>("birkhoff::_sorted_attention");
  return op;
}
const auto& sorted_backward_op() {
  static const auto op =
      find<decltype(sorted_attention_backward)>("birkhoff::_sorted_attention_backward");
  return op;
}
const auto& balance_forward_op() {
  static const auto op = find<decltype(sinkhorn_balance)>("birkhoff::_sinkhorn_balance");
  return op;
}
const auto& balance_backward_op() {
  static const auto op =
      find<decltype(sinkhorn_balance_backward)>("birkhoff::_sinkhorn_balance_backward");
  return op;
}

// ---- Autograd.

struct BlockLocalAttention : torch::autograd::Function<BlockLocalAttention> {
  static variable_list forward(AutogradContext* context, const Tensor& q, const Tensor& k,
                               const Tensor& v, std::int64_t block, std::int64_t look_back,
                               std::int64_t look_ahead, bool causal) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [out, softmax] =
        block_local_forward_op().call(q, k, v, block, look_back, look_ahead, causal);
    context->save_for_backward({q, k, v, out, softmax});
    context->saved_data["block"] = block;
    context->saved_data["look_back"] = look_back;
    context->saved_data["look_ahead"] = look_ahead;
    context->saved_data["causal"] = causal;
    context->mark_non_differentiable({softmax});
    return {out, softmax};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& data = context->saved_data;
    const auto [d_q, d_k, d_v] = block_local_backward_op().call(
        gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], data.at("block").toInt(),
        data.at("look_back").toInt(), data.at("look_ahead").toInt(), data.at("causal").toBool());
    return {d_q, d_k, d_v, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

struct SortedAttention : torch::autograd::Function<SortedAttention> {
  static variable_list forward(AutogradContext* context, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& weights, std::int64_t block,
                               bool causal) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [out, softmax] = sorted_forward_op().call(q, k, v, weights, block, causal);
    context->save_for_backward({q, k, v, weights, out, softmax});
    context->saved_data["block"] = block;
    context->saved_data["causal"] = causal;
    context->mark_non_differentiable({softmax});
    return {out, softmax};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& data = context->saved_data;
    const auto [d_q, d_k, d_v, d_weights] =
        sorted_backward_op().call(gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4],
                                  saved[5], data.at("block").toInt(), data.at("causal").toBool());
    return {d_q, d_k, d_v, d_weights, Tensor(), Tensor()};
  }
};

struct SinkhornBalance : torch::autograd::Function<SinkhornBalance> {
  static variable_list forward(AutogradContext* context, const Tensor& scores,
                               std::int64_t iterations, std::string_view form) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [weights, solved] = balance_forward_op().call(scores, iterations, form);
    context->save_for_backward({scores, solved});
    context->saved_data["iterations"] = iterations;
    context->saved_data["form"] = std::string(form);
    context->mark_non_differentiable({solved});
    return {weights, solved};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& data = context->saved_data;
    return {
        balance_backward_op().call(gradients[0], saved[0], saved[1], data.at("iterations").toInt(),
                                   data.at("form").toStringView()),
        Tensor(), Tensor()};
  }
};

template <typename Function, typename... Arguments>
Two with_gradient(Arguments... arguments) {
  const variable_list results = Function::apply(arguments...);
  return {results[0], results[1]};
}

// ---- Shapes, also symbolic ones.

Two attention_meta(const Tensor& q, std::int64_t block) {
  const c10::SymInt num_blocks = (q.sym_size(2) + (block - 1)) / block;
  return {at::empty_like(q),
          at::empty_symint({2, q.sym_size(0), q.sym_size(1), num_blocks, block},
                           q.options().dtype(at::toOpMathType(q.scalar_type())))};
}

Two block_local_meta(const Tensor& q, const Tensor&, const Tensor&, std::int64_t block,
                     std::int64_t, std::int64_t, bool) {
  return attention_meta(q, block);
}

Three block_local_backward_meta(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor&, const Tensor&, std::int64_t, std::int64_t,
                                std::int64_t, bool) {
  return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
}

Two sorted_meta(const Tensor& q, const Tensor&, const Tensor&, const Tensor&, std::int64_t block,
                bool) {
  return attention_meta(q, block);
}

Four sorted_backward_meta(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& weights, const Tensor&, const Tensor&, std::int64_t, bool) {
  return {at::empty_like(q), at::empty_like(k), at::empty_like(v), at::empty_like(weights)};
}

Two balance_meta(const Tensor& scores, std::int64_t, std::string_view form) {
  const c10::SymInt rows = form == "prefix" ? scores.sym_size(2) : c10::SymInt(1);
  return {at::empty_like(scores),
          at::empty_symint({scores.sym_size(0), scores.sym_size(1), rows, 1},
                           scores.options().dtype(at::kBool))};
}

Tensor balance_backward_meta(const Tensor&, const Tensor& scores, const Tensor&, std::int64_t,
                             std::string_view) {
  return at::empty_like(scores);
}

// ---- What users call.

Tensor user_block_local(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t block,
                        std::int64_t look_back, std::int64_t look_ahead, bool causal) {
  return std::get<0>(block_local_forward_op().call(q, k, v, block, look_back, look_ahead, causal));
}

Tensor user_sorted(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& weights,
                   std::int64_t block, bool causal) {
  return std::get<0>(sorted_forward_op().call(q, k, v, weights, block, causal));
}

Tensor user_balance(const Tensor& scores, std::int64_t iterations, std::string_view form) {
  return std::get<0>(balance_forward_op().call(scores, iterations, form));
}

Tensor user_sinkhorn(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& scores,
                     std::int64_t block, std::string_view form, std::int64_t iterations) {
  return user_sorted(q, k, v, user_balance(scores, iterations, form), block,
                     /*causal=*/form != "full");
}

Tensor user_dense(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  return at::scaled_dot_product_attention(q, k, v, {}, 0, causal);
}

void implement_kernels(torch::Library& library) {
  library.impl("_block_local_attention", &block_local_attention);
  library.impl("_block_local_attention_backward", &block_local_attention_backward);
  library.impl("_sorted_attention", &sorted_attention);
  library.impl("_sorted_attention_backward", &sorted_attention_backward);
  library.impl("_sinkhorn_balance", &sinkhorn_balance);
  library.impl("_sinkhorn_balance_backward", &sinkhorn_balance_backward);
}

}  // namespace

TORCH_LIBRARY(birkhoff, library) {
  const auto define = [&](const char* schema) {
    library.def(schema, {at::Tag::pt2_compliant_tag});
  };
  define(
      "block_local_attention(Tensor q, Tensor k, Tensor v, int block, int look_back=0, "
      "int look_ahead=0, bool causal=True) -> Tensor");
  define(
      "sinkhorn_attention(Tensor q, Tensor k, Tensor v, Tensor scores, int block, "
      "str balance='prefix', int iterations=5) -> Tensor");
  define("sinkhorn_balance(Tensor scores, int iterations=5, str balance='prefix') -> Tensor");
  define(
      "sorted_attention(Tensor q, Tensor k, Tensor v, Tensor weights, int block, "
      "bool causal=True) -> Tensor");
  define("dense_attention(Tensor q, Tensor k, Tensor v, bool causal=True) -> Tensor");

  define(
      "_block_local_attention(Tensor q, Tensor k, Tensor v, int block, int look_back, "
      "int look_ahead, bool causal) -> (Tensor, Tensor)");
  define(
      "_block_local_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor softmax, "
      "int block, int look_back, int look_ahead, bool causal) -> (Tensor, Tensor, Tensor)");
  define(
      "_sorted_attention(Tensor q, Tensor k, Tensor v, Tensor weights, int block, bool causal) "
      "-> (Tensor, Tensor)");
  define(
      "_sorted_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor weights, "
      "Tensor out, Tensor softmax, int block, bool causal) -> (Tensor, Tensor, Tensor, Tensor)");
  define("_sinkhorn_balance(Tensor scores, int iterations, str balance) -> (Tensor, Tensor)");
  define(
      "_sinkhorn_balance_backward(Tensor d_weights, Tensor scores, Tensor solved, int iterations, "
      "str balance) -> Tensor");
}

TORCH_LIBRARY_IMPL(birkhoff, CompositeImplicitAutograd, library) {
  library.impl("block_local_attention", &user_block_local);
  library.impl("sinkhorn_attention", &user_sinkhorn);
  library.impl("sinkhorn_balance", &user_balance);
  library.impl("sorted_attention", &user_sorted);
  library.impl("dense_attention", &user_dense);
}

TORCH_LIBRARY_IMPL(birkhoff, CPU, library) { implement_kernels(library); }
TORCH_LIBRARY_IMPL(birkhoff, CUDA, library) { implement_kernels(library); }

TORCH_LIBRARY_IMPL(birkhoff, Meta, library) {
  library.impl("_block_local_attention", &block_local_meta);
  library.impl("_block_local_attention_backward", &block_local_backward_meta);
  library.impl("_sorted_attention", &sorted_meta);
  library.impl("_sorted_attention_backward", &sorted_backward_meta);
  library.impl("_sinkhorn_balance", &balance_meta);
  library.impl("_sinkhorn_balance_backward", &balance_backward_meta);
}

TORCH_LIBRARY_IMPL(birkhoff, Autograd, library) {
  library.impl("_block_local_attention",
               &with_gradient<BlockLocalAttention, const Tensor&, const Tensor&, const Tensor&,
                              std::int64_t, std::int64_t, std::int64_t, bool>);
  library.impl("_sorted_attention",
               &with_gradient<SortedAttention, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&, std::int64_t, bool>);
  library.impl("_sinkhorn_balance",
               &with_gradient<SinkhornBalance, const Tensor&, std::int64_t, std::string_view>);
  // No gradients of gradients: who asks for them is told so.
  for (const char* name : {"_block_local_attention_backward", "_sorted_attention_backward",
                           "_sinkhorn_balance_backward"}) {
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace birkhoff::ops
