// The operators of attention over gathered rows, registered as in operators.cpp.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "attention/pytorch/calls.h"
#include "attention/pytorch/dispatch.h"
#include "attention/pytorch/gathered_calls.h"

namespace birkhoff::ops {
namespace {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// Shapes, also symbolic ones.
Tensor chosen_meta(const Tensor& q, const Tensor& k, std::int64_t block, std::int64_t count, bool,
                   const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  check_choice(q, k, block, count, key_lengths, segments);
  return at::empty_symint({k.sym_size(0), k.sym_size(1), k.sym_size(2), count},
                          q.options().dtype(at::kLong));
}

using ClusterOperator =
    WithGradient<AttentionInClusters, const Tensor&, std::int64_t, std::string_view,
                 std::string_view, double, const OptionalTensor&, const OptionalTensor&>;
using ListedOperator = WithGradient<AttentionToListedBlocks, const Tensor&, std::int64_t, bool,
                                    const OptionalTensor&, const OptionalTensor&>;

// ---- The operators for users.

Three user_routing(const Tensor& q, const OptionalTensor& k, const Tensor& v,
                   const Tensor& centroids, std::int64_t window, std::string_view selection,
                   std::string_view overlap, double logit_scale, const OptionalTensor& key_lengths,
                   const OptionalTensor& segments, const OptionalTensor& relative_keys,
                   const OptionalTensor& relative_values, const OptionalTensor& sink) {
  const Tensors results = ClusterOperator::call(
      with_given_terms(q, or_none("k", k, q), v, relative_keys, relative_values, sink), centroids,
      window, selection, overlap, logit_scale, key_lengths, segments);
  return {results[0], results[1], results[2]};
}

Tensor user_listed(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& chosen,
                   std::int64_t block, bool causal, const OptionalTensor& key_lengths,
                   const OptionalTensor& segments, const OptionalTensor& relative_keys,
                   const OptionalTensor& relative_values, const OptionalTensor& sink) {
  return ListedOperator::call(with_given_terms(q, k, v, relative_keys, relative_values, sink),
                              chosen, block, causal, key_lengths, segments)[0];
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

  ClusterOperator::define(library);
  ListedOperator::define(library);
}

TORCH_LIBRARY_IMPL(birkhoff, CompositeImplicitAutograd, library) {
  library.impl("routing_attention", &user_routing);
  library.impl("listed_block_attention", &user_listed);
}

TORCH_LIBRARY_IMPL(birkhoff, CPU, library) { library.impl("select_top_blocks", &chosen_blocks); }
TORCH_LIBRARY_IMPL(birkhoff, CUDA, library) { library.impl("select_top_blocks", &chosen_blocks); }

TORCH_LIBRARY_IMPL(birkhoff, Meta, library) { library.impl("select_top_blocks", &chosen_meta); }

TORCH_LIBRARY_IMPL(birkhoff, Autograd, library) {
  library.impl("select_top_blocks", torch::CppFunction::makeFallthrough());
}

}  // namespace birkhoff::ops
