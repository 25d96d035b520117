// The operators of attention over gathered rows, registered as in operators.cpp.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "attention/pytorch/calls.h"
#include "attention/pytorch/dispatch.h"
#include "attention/pytorch/gathered_calls.h"

namespace birkhoff::ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Three = std::tuple<Tensor, Tensor, Tensor>;

const auto& clusters_op() {
  static const auto op = find<decltype(attention_in_clusters)>("birkhoff::_attention_in_clusters");
  return op;
}
const auto& clusters_backward_op() {
  static const auto op =
      find<decltype(attention_in_clusters_backward)>("birkhoff::_attention_in_clusters_backward");
  return op;
}
const auto& listed_op() {
  static const auto op =
      find<decltype(attention_to_listed_blocks)>("birkhoff::_attention_to_listed_blocks");
  return op;
}
const auto& listed_backward_op() {
  static const auto op = find<decltype(attention_to_listed_blocks_backward)>(
      "birkhoff::_attention_to_listed_blocks_backward");
  return op;
}

// ---- Autograd.

struct AttentionInClusters : torch::autograd::Function<AttentionInClusters> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs,
                               const Tensor& centroids, std::int64_t window,
                               std::string_view selection, std::string_view overlap,
                               double logit_scale, const OptionalTensor& key_lengths,
                               const OptionalTensor& segments) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [out, distance, sums] = clusters_op().call(
        inputs, centroids, window, selection, overlap, logit_scale, key_lengths, segments);
    variable_list saved{centroids, key_lengths.value_or(Tensor()), segments.value_or(Tensor())};
    saved.insert(saved.end(), inputs.begin(), inputs.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["window"] = window;
    context->saved_data["selection"] = std::string(selection);
    context->saved_data["overlap"] = std::string(overlap);
    context->saved_data["logit_scale"] = logit_scale;
    context->mark_non_differentiable({sums});
    return {out, distance, sums};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& data = context->saved_data;
    variable_list result = clusters_backward_op().call(
        gradients[0], gradients[1], at::TensorList(saved).slice(3), saved[0],
        data.at("window").toInt(), data.at("selection").toStringView(),
        data.at("overlap").toStringView(), data.at("logit_scale").toDouble(), if_defined(saved[1]),
        if_defined(saved[2]));
    result.resize(result.size() + 7);  // none for the other arguments
    return result;
  }
};

struct AttentionToListedBlocks : torch::autograd::Function<AttentionToListedBlocks> {
  static Tensor forward(AutogradContext* context, at::TensorList inputs, const Tensor& chosen,
                        std::int64_t block, bool causal, const OptionalTensor& key_lengths,
                        const OptionalTensor& segments) {
    const at::AutoDispatchBelowADInplaceOrView below;
    variable_list saved{chosen, key_lengths.value_or(Tensor()), segments.value_or(Tensor())};
    saved.insert(saved.end(), inputs.begin(), inputs.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["block"] = block;
    context->saved_data["causal"] = causal;
    return listed_op().call(inputs, chosen, block, causal, key_lengths, segments);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& data = context->saved_data;
    variable_list result = listed_backward_op().call(
        gradients[0], at::TensorList(saved).slice(3), saved[0], data.at("block").toInt(),
        data.at("causal").toBool(), if_defined(saved[1]), if_defined(saved[2]));
    result.resize(result.size() + 5);  // none for the other arguments
    return result;
  }
};

// ---- Shapes, also symbolic ones.

Three clusters_meta(at::TensorList inputs, const Tensor& centroids, std::int64_t window,
                    std::string_view selection, std::string_view overlap, double logit_scale,
                    const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_clusters(inputs, centroids, window, selection, overlap, logit_scale, key_lengths, segments);
  const Tensor &q = inputs[kQueries], &v = inputs[kValues];
  return {at::empty_like(q), at::empty_symint({q.sym_size(0), v.sym_size(1)}, centroids.options()),
          at::empty_symint({v.sym_size(1), centroids.sym_size(1), q.sym_size(3) + 1},
                           centroids.options())};
}

Tensor listed_meta(at::TensorList inputs, const Tensor& chosen, std::int64_t block, bool,
                   const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_listed_blocks(inputs, chosen, block, key_lengths, segments);
  return at::empty_like(inputs[kQueries]);
}

Tensor chosen_meta(const Tensor& q, const Tensor& k, std::int64_t block, std::int64_t count, bool,
                   const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_choice(q, k, block, count, key_lengths, segments);
  return at::empty_symint({k.sym_size(0), k.sym_size(1), k.sym_size(2), count},
                          q.options().dtype(at::kLong));
}

// ---- The operators for users.

Three user_routing(const Tensor& q, const OptionalTensor& k, const Tensor& v,
                   const Tensor& centroids, std::int64_t window, std::string_view selection,
                   std::string_view overlap, double logit_scale, const OptionalTensor& key_lengths,
                   const OptionalTensor& segments, const OptionalTensor& relative_keys,
                   const OptionalTensor& relative_values, const OptionalTensor& sink) {
  return clusters_op().call(
      with_terms(q, or_none("k", k, q), v, relative_keys, relative_values, sink), centroids, window,
      selection, overlap, logit_scale, key_lengths, segments);
}

Tensor user_listed(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& chosen,
                   std::int64_t block, bool causal, const OptionalTensor& key_lengths,
                   const OptionalTensor& segments, const OptionalTensor& relative_keys,
                   const OptionalTensor& relative_values, const OptionalTensor& sink) {
  return listed_op().call(with_terms(q, k, v, relative_keys, relative_values, sink), chosen, block,
                          causal, key_lengths, segments);
}

void implement_gathered(torch::Library& library) {
  library.impl("_attention_in_clusters", &attention_in_clusters);
  library.impl("_attention_in_clusters_backward", &attention_in_clusters_backward);
  library.impl("_attention_to_listed_blocks", &attention_to_listed_blocks);
  library.impl("_attention_to_listed_blocks_backward", &attention_to_listed_blocks_backward);
  library.impl("select_top_blocks", &chosen_blocks);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(birkhoff, library) {
  const auto define = [&](const std::string& schema) {
    library.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  };
  const std::string masks = "Tensor? key_lengths=None, Tensor? segments=None",
                    terms =
                        ", Tensor? relative_keys=None, Tensor? relative_values=None, "
                        "Tensor? sink=None";
  define(
      "routing_attention(Tensor q, Tensor? k, Tensor v, Tensor centroids, int window, "
      "str selection='causal_bucket', *, str overlap='mean', float logit_scale=0.0, " +
      masks + terms + ") -> (Tensor, Tensor, Tensor)");
  define(
      "listed_block_attention(Tensor q, Tensor k, Tensor v, Tensor chosen, int block, "
      "bool causal=True, *, " +
      masks + terms + ") -> Tensor");
  define("select_top_blocks(Tensor q, Tensor k, int block, int count, bool causal=True, *, " +
         masks + ") -> Tensor");

  const std::string clusters =
      "Tensor[] inputs, Tensor centroids, int window, str selection, str overlap, "
      "float logit_scale, Tensor? key_lengths, Tensor? segments";
  define("_attention_in_clusters(" + clusters + ") -> (Tensor, Tensor, Tensor)");
  define("_attention_in_clusters_backward(Tensor d_out, Tensor d_distance, " + clusters +
         ") -> Tensor[]");
  const std::string listed =
      "Tensor[] inputs, Tensor chosen, int block, bool causal, Tensor? key_lengths, "
      "Tensor? segments";
  define("_attention_to_listed_blocks(" + listed + ") -> Tensor");
  define("_attention_to_listed_blocks_backward(Tensor d_out, " + listed + ") -> Tensor[]");
}

TORCH_LIBRARY_IMPL(birkhoff, CompositeImplicitAutograd, library) {
  library.impl("routing_attention", &user_routing);
  library.impl("listed_block_attention", &user_listed);
}

TORCH_LIBRARY_IMPL(birkhoff, CPU, library) { implement_gathered(library); }
TORCH_LIBRARY_IMPL(birkhoff, CUDA, library) { implement_gathered(library); }

TORCH_LIBRARY_IMPL(birkhoff, Meta, library) {
  library.impl("_attention_in_clusters", &clusters_meta);
  library.impl("_attention_in_clusters_backward", gradients_meta(&attention_in_clusters_backward));
  library.impl("_attention_to_listed_blocks", &listed_meta);
  library.impl("_attention_to_listed_blocks_backward",
               gradients_meta(&attention_to_listed_blocks_backward));
  library.impl("select_top_blocks", &chosen_meta);
}

TORCH_LIBRARY_IMPL(birkhoff, Autograd, library) {
  library.impl("_attention_in_clusters",
               with_gradient<AttentionInClusters>(&attention_in_clusters));
  library.impl("_attention_to_listed_blocks",
               with_gradient<AttentionToListedBlocks>(&attention_to_listed_blocks));
  library.impl("select_top_blocks", torch::CppFunction::makeFallthrough());
  for (const char* name :
       {"_attention_in_clusters_backward", "_attention_to_listed_blocks_backward"}) {
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace birkhoff::ops
