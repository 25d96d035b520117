// The operators of attention over all pairs of queries and keys, registered as in operators.cpp.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>

#include "attention/pytorch/all_pairs_calls.h"
#include "attention/pytorch/dispatch.h"

namespace birkhoff::ops {
namespace {

using at::Tensor;

using RowOperator =
    WithGradient<AttentionByRows, std::int64_t, bool, bool, double, const OptionalTensor&,
                 const OptionalTensor&, const OptionalTensor&>;
using DoublyStochasticOperator =
    WithGradient<DoublyStochasticOperation, std::int64_t, std::string_view, double,
                 const OptionalTensor&, const OptionalTensor&, const OptionalTensor&>;

// ---- The operators for users.

Tensor user_top_k(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t count,
                  bool causal, double dropout, const OptionalTensor& seed,
                  const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  return RowOperator::call({q, k, v, or_none("alpha", std::nullopt, q)}, count, /*learns=*/false,
                           causal, dropout, seed, key_lengths, segments)[0];
}

Tensor user_entmax(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& alpha,
                   bool causal, double dropout, const OptionalTensor& seed,
                   const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  Tensor exponents = alpha ? or_none("alpha", alpha, q) : at::full({}, 1.5, q.options());
  if (q.dim() > 1 && exponents.sym_numel() == 1) {
    exponents = exponents.reshape({1}).expand_symint({q.sym_size(1)});
  }
  return RowOperator::call({q, k, v, exponents}, /*count=*/0, exponents.requires_grad(), causal,
                           dropout, seed, key_lengths, segments)[0];
}

Tensor user_sinkformer(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t half_steps,
                       std::string_view gradient, double dropout, const OptionalTensor& seed,
                       const OptionalTensor& query_lengths, const OptionalTensor& key_lengths) {
  return DoublyStochasticOperator::call({q, k, v}, half_steps, gradient, dropout, seed,
                                        query_lengths, key_lengths)[0];
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(birkhoff, library) {
  const auto define = [&](const std::string& schema) {
    library.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  };
  const std::string dropout = "*, float dropout=0.0, Tensor? seed=None, ",
                    masks = "Tensor? key_lengths=None, Tensor? segments=None";
  define("top_k_attention(Tensor q, Tensor k, Tensor v, int count, bool causal=True, " + dropout +
         masks + ") -> Tensor");
  define("entmax_attention(Tensor q, Tensor k, Tensor v, Tensor? alpha=None, bool causal=True, " +
         dropout + masks + ") -> Tensor");
  define(
      "sinkformer_attention(Tensor q, Tensor k, Tensor v, int half_steps=3, "
      "str gradient='unrolled', " +
      dropout + "Tensor? query_lengths=None, Tensor? key_lengths=None) -> Tensor");
  RowOperator::define(library);
  DoublyStochasticOperator::define(library);
}

TORCH_LIBRARY_IMPL(birkhoff, CompositeImplicitAutograd, library) {
  library.impl("top_k_attention", &user_top_k);
  library.impl("entmax_attention", &user_entmax);
  library.impl("sinkformer_attention", &user_sinkformer);
}

}  // namespace birkhoff::ops
