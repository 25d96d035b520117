// The operators that docs/pytorch.md documents. They are registered with PyTorch's dispatcher when
// this library is loaded. Operators without an underscore are for users; all of these but
// open_block_pairs are composed of operators with an underscore. The latter have a kernel
// (calls.h), a meta function for tracing and torch.compile, and a gradient that is an operator too,
// so compiled graphs hold both passes.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/limits.h"
#include "attention/pytorch/arguments.h"
#include "attention/pytorch/calls.h"
#include "attention/pytorch/dispatch.h"

namespace birkhoff::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Two = std::tuple<Tensor, Tensor>;

// ---- Both passes of each operator, called through the dispatcher.

const auto& attention_forward_op() {
  static const auto op = find<decltype(attention_in_blocks)>("birkhoff::_attention_in_blocks");
  return op;
}
const auto& attention_backward_op() {
  static const auto op =
      find<decltype(attention_in_blocks_backward)>("birkhoff::_attention_in_blocks_backward");
  return op;
}
const auto& open_block_pairs_op() {
  static const auto op = find<decltype(open_block_pairs)>("birkhoff::open_block_pairs");
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

struct AttentionInBlocks : torch::autograd::Function<AttentionInBlocks> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs, std::int64_t block,
                               std::int64_t look_back, std::int64_t look_ahead, bool causal,
                               std::string_view combine, double dropout, const OptionalTensor& seed,
                               const OptionalTensor& key_lengths, const OptionalTensor& segments) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [out, softmax] =
        attention_forward_op().call(inputs, block, look_back, look_ahead, causal, combine, dropout,
                                    seed, key_lengths, segments);
    variable_list saved{out, softmax, seed.value_or(Tensor()), key_lengths.value_or(Tensor()),
                        segments.value_or(Tensor())};
    saved.insert(saved.end(), inputs.begin(), inputs.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["block"] = block;
    context->saved_data["look_back"] = look_back;
    context->saved_data["look_ahead"] = look_ahead;
    context->saved_data["causal"] = causal;
    context->saved_data["combine"] = std::string(combine);
    context->saved_data["dropout"] = dropout;
    context->mark_non_differentiable({softmax});
    return {out, softmax};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::TensorList inputs = at::TensorList(saved).slice(kNumOthers);
    const auto& data = context->saved_data;
    variable_list result = attention_backward_op().call(
        gradients[0], inputs, saved[0], saved[1], data.at("block").toInt(),
        data.at("look_back").toInt(), data.at("look_ahead").toInt(), data.at("causal").toBool(),
        data.at("combine").toStringView(), data.at("dropout").toDouble(), if_defined(saved[2]),
        if_defined(saved[3]), if_defined(saved[4]));
    result.resize(inputs.size() + kNumOptions);
    return result;
  }

 private:
  static constexpr std::size_t kNumOthers = 5;   // saved before the inputs
  static constexpr std::size_t kNumOptions = 9;  // arguments after the inputs
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

// ---- Shapes, also symbolic ones.

c10::SymInt num_blocks(const Tensor& q, std::int64_t block) {
  return (q.sym_size(2) + (block - 1)) / block;
}

Two attention_meta(at::TensorList inputs, std::int64_t block, std::int64_t look_back,
                   std::int64_t look_ahead, bool causal, std::string_view combine, double dropout,
                   const OptionalTensor& seed, const OptionalTensor& key_lengths,
                   const OptionalTensor& segments) {
  check_options(inputs, block, look_back, look_ahead, causal, combine, dropout, seed, key_lengths,
                segments);
  const Tensor& q = inputs[0];
  const bool whole = block == kWholeSequence;
  const c10::SymInt N = whole ? c10::SymInt(1) : num_blocks(q, block);
  // As block_within in calls.cpp.
  const c10::SymInt tokens = whole ? q.sym_size(2) : q.sym_size(2).min(block);
  return {at::empty_like(q),
          at::empty_symint({2, q.sym_size(0), q.sym_size(1), N, tokens},
                           q.options().dtype(at::toOpMathType(q.scalar_type())))};
}

Tensor open_block_pairs_meta(const Tensor& q, std::int64_t block, const OptionalTensor& key_lengths,
                             const OptionalTensor& segments) {
  check_block(block);
  check_mask_types(q, key_lengths, segments);
  const c10::SymInt N = num_blocks(q, block);
  return at::empty_symint({q.sym_size(0), 1, N, N}, q.options().dtype(at::kBool));
}

Two balance_meta(const Tensor& scores, std::int64_t iterations, std::string_view form) {
  form_named(form);
  check_iterations(iterations);
  const c10::SymInt rows = form == "prefix" ? scores.sym_size(2) : c10::SymInt(1);
  return {at::empty_like(scores),
          at::empty_symint({scores.sym_size(0), scores.sym_size(1), rows, 1},
                           scores.options().dtype(at::kBool))};
}

Tensor balance_backward_meta(const Tensor&, const Tensor& scores, const Tensor&, std::int64_t,
                             std::string_view) {
  return at::empty_like(scores);
}

// ---- The operators for users.

Tensor user_block_local(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t block,
                        std::int64_t look_back, std::int64_t look_ahead, bool causal,
                        double dropout, const OptionalTensor& seed,
                        const OptionalTensor& key_lengths, const OptionalTensor& segments,
                        const OptionalTensor& relative_keys, const OptionalTensor& relative_values,
                        const OptionalTensor& sink) {
  check_block(block);
  return std::get<0>(attention_forward_op().call(
      with_terms(q, k, v, relative_keys, relative_values, sink), block, look_back, look_ahead,
      causal, "concat", dropout, seed, key_lengths, segments));
}

Tensor user_sorted(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& weights,
                   std::int64_t block, bool causal, std::string_view combine, double dropout,
                   const OptionalTensor& seed, const OptionalTensor& key_lengths,
                   const OptionalTensor& segments, const OptionalTensor& relative_keys,
                   const OptionalTensor& relative_values, const OptionalTensor& sink) {
  check_block(block);
  std::vector<Tensor> inputs = with_terms(q, k, v, relative_keys, relative_values, sink);
  inputs.push_back(weights);
  return std::get<0>(attention_forward_op().call(inputs, block, 0, 0, causal, combine, dropout,
                                                 seed, key_lengths, segments));
}

Tensor user_balance(const Tensor& scores, std::int64_t iterations, std::string_view form) {
  return std::get<0>(balance_forward_op().call(scores, iterations, form));
}

Tensor user_sinkhorn(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& scores,
                     std::int64_t block, std::string_view form, std::int64_t iterations,
                     std::string_view combine, double dropout, const OptionalTensor& seed,
                     const OptionalTensor& key_lengths, const OptionalTensor& segments,
                     const OptionalTensor& relative_keys, const OptionalTensor& relative_values,
                     const OptionalTensor& sink) {
  check_block(block);
  std::vector<Tensor> inputs = with_terms(q, k, v, relative_keys, relative_values, sink);
  inputs.push_back(scores);
  check_options(inputs, block, 0, 0, form != "full", combine, dropout, seed, key_lengths, segments);
  Tensor open_scores = scores;
  if (key_lengths || segments) {
    const Tensor open = open_block_pairs_op().call(q, block, key_lengths, segments);
    TORCH_CHECK_VALUE(scores.dim() == 4 && scores.sym_size(0) == open.sym_size(0) &&
                          scores.sym_size(2) == open.sym_size(2) &&
                          scores.sym_size(3) == open.sym_size(3),
                      "birkhoff: scores must be [B, H, N, N] with N = ", open.sym_size(3), ", not ",
                      scores.sym_sizes());
    open_scores = scores.masked_fill(open.logical_not(), -std::numeric_limits<double>::infinity());
  }
  return user_sorted(q, k, v, user_balance(open_scores, iterations, form), block,
                     /*causal=*/form != "full", combine, dropout, seed, key_lengths, segments,
                     relative_keys, relative_values, sink);
}

// Whether the CPU kernels can compute dense attention of these tensors.
bool fits_kernels(const Tensor& q, const Tensor& k, const Tensor& v) {
  const at::ScalarType dtype = q.scalar_type();
  return q.is_cpu() && q.dim() == 4 && q.sym_numel() > 0 && q.sym_size(3) <= kMaxTileHeadDim &&
         has_tile_type(dtype) && k.scalar_type() == dtype && v.scalar_type() == dtype &&
         v.sym_sizes() == k.sym_sizes() && k.sym_size(0) == q.sym_size(0) &&
         k.sym_size(2) == q.sym_size(2) && k.sym_size(3) == q.sym_size(3);
}

// Without any option, PyTorch's own attention serves calls that the CPU kernels do not support, and
// all calls on a GPU.
Tensor user_dense(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double dropout,
                  const OptionalTensor& seed, const OptionalTensor& key_lengths,
                  const OptionalTensor& segments, const OptionalTensor& relative_keys,
                  const OptionalTensor& relative_values, const OptionalTensor& sink) {
  const std::vector<Tensor> inputs = with_terms(q, k, v, relative_keys, relative_values, sink);
  check_options(inputs, kWholeSequence, 0, 0, causal, "concat", dropout, seed, key_lengths,
                segments);
  const bool plain = dropout == 0 && !key_lengths && !segments && !relative_keys && !sink;
  if (plain && !fits_kernels(q, k, v)) {
    return at::scaled_dot_product_attention(q, k, v, {}, 0, causal, std::nullopt,
                                            /*enable_gqa=*/q.sym_size(1) != k.sym_size(1));
  }
  return std::get<0>(attention_forward_op().call(inputs, kWholeSequence, 0, 0, causal, "concat",
                                                 dropout, seed, key_lengths, segments));
}

void implement_kernels(torch::Library& library) {
  library.impl("_attention_in_blocks", &attention_in_blocks);
  library.impl("_attention_in_blocks_backward", &attention_in_blocks_backward);
  library.impl("open_block_pairs", &open_block_pairs);
  library.impl("_sinkhorn_balance", &sinkhorn_balance);
  library.impl("_sinkhorn_balance_backward", &sinkhorn_balance_backward);
}

}  // namespace

TORCH_LIBRARY(birkhoff, library) {
  const auto define = [&](const std::string& schema) {
    library.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  };
  const std::string masks = "Tensor? key_lengths=None, Tensor? segments=None";
  const std::string options_of_users =
      "float dropout=0.0, Tensor? seed=None, " + masks +
      ", Tensor? relative_keys=None, Tensor? relative_values=None, Tensor? sink=None";
  define(
      "block_local_attention(Tensor q, Tensor k, Tensor v, int block, int look_back=0, "
      "int look_ahead=0, bool causal=True, *, " +
      options_of_users + ") -> Tensor");
  define(
      "sinkhorn_attention(Tensor q, Tensor k, Tensor v, Tensor scores, int block, "
      "str balance='prefix', int iterations=5, *, str combine='concat', " +
      options_of_users + ") -> Tensor");
  define("sinkhorn_balance(Tensor scores, int iterations=5, str balance='prefix') -> Tensor");
  define(
      "sorted_attention(Tensor q, Tensor k, Tensor v, Tensor weights, int block, "
      "bool causal=True, *, str combine='concat', " +
      options_of_users + ") -> Tensor");
  define("open_block_pairs(Tensor q, int block, *, " + masks + ") -> Tensor");
  define("dense_attention(Tensor q, Tensor k, Tensor v, bool causal=True, *, " + options_of_users +
         ") -> Tensor");

  const std::string options =
      "int block, int look_back, int look_ahead, bool causal, str combine, float dropout, "
      "Tensor? seed, Tensor? key_lengths, Tensor? segments";
  define("_attention_in_blocks(Tensor[] inputs, " + options + ") -> (Tensor, Tensor)");
  define(
      "_attention_in_blocks_backward(Tensor d_out, Tensor[] inputs, Tensor out, Tensor softmax, " +
      options + ") -> Tensor[]");
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
  library.impl("_attention_in_blocks", &attention_meta);
  library.impl("_attention_in_blocks_backward", gradients_meta(&attention_in_blocks_backward));
  library.impl("open_block_pairs", &open_block_pairs_meta);
  library.impl("_sinkhorn_balance", &balance_meta);
  library.impl("_sinkhorn_balance_backward", &balance_backward_meta);
}

TORCH_LIBRARY_IMPL(birkhoff, Autograd, library) {
  library.impl("_attention_in_blocks", with_gradient<AttentionInBlocks>(&attention_in_blocks));
  library.impl("_sinkhorn_balance", with_gradient<SinkhornBalance>(&sinkhorn_balance));
  library.impl("open_block_pairs", torch::CppFunction::makeFallthrough());
  // There are no second gradients: asking for one is an error that says so.
  for (const char* name : {"_attention_in_blocks_backward", "_sinkhorn_balance_backward"}) {
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace birkhoff::ops
