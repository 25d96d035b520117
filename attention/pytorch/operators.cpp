// The operators that docs/pytorch.md documents. They are registered with PyTorch's dispatcher when
// this library is loaded. Operators without an underscore are for users; all of these but
// open_block_pairs are composed of operators with an underscore. The latter have a kernel
// (calls.h), a meta function for tracing and torch.compile, and a gradient (dispatch.h).
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/limits.h"
#include "attention/pytorch/arguments.h"
#include "attention/pytorch/calls.h"
#include "attention/pytorch/dispatch.h"
#include "attention/pytorch/pattern_calls.h"

namespace birkhoff::ops {
namespace {

using at::Tensor;

const auto& open_block_pairs_op() {
  static const auto op = find<decltype(open_block_pairs)>("open_block_pairs");
  return op;
}

// Shapes, also symbolic ones.
Tensor open_block_pairs_meta(const Tensor& q, std::int64_t block, const OptionalTensor& key_lengths,
                             const OptionalTensor& segments) {
  check_block(block);
  check_mask_types(q, key_lengths, segments);
  const c10::SymInt N = (q.sym_size(2) + (block - 1)) / block;
  return at::empty_symint({q.sym_size(0), 1, N, N}, q.options().dtype(at::kBool));
}

using BlockOperator = WithGradient<AttentionInBlocks, std::int64_t, std::int64_t, std::int64_t,
                                   bool, std::string_view, double, const OptionalTensor&,
                                   const OptionalTensor&, const OptionalTensor&>;
using BalanceOperator = WithGradient<SinkhornBalance, std::int64_t, std::string_view>;
using SharedOperator = WithGradient<AttentionToSharedBlocks, std::int64_t, bool, double,
                                    const OptionalTensor&, const OptionalTensor&>;
using PatternOperator =
    WithGradient<AttentionInPattern, std::int64_t, std::int64_t, std::string_view, std::string_view,
                 bool, const OptionalTensor&, const OptionalTensor&>;

// ---- The operators for users.

Tensor user_block_local(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t block,
                        std::int64_t look_back, std::int64_t look_ahead, bool causal,
                        double dropout, const OptionalTensor& seed,
                        const OptionalTensor& key_lengths, const OptionalTensor& segments,
                        const OptionalTensor& relative_keys, const OptionalTensor& relative_values,
                        const OptionalTensor& sink) {
  check_block(block);
  return BlockOperator::call(with_given_terms(q, k, v, relative_keys, relative_values, sink), block,
                             look_back, look_ahead, causal, "concat", dropout, seed, key_lengths,
                             segments)[0];
}

Tensor user_sorted(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& weights,
                   std::int64_t block, bool causal, std::string_view combine, double dropout,
                   const OptionalTensor& seed, const OptionalTensor& key_lengths,
                   const OptionalTensor& segments, const OptionalTensor& relative_keys,
                   const OptionalTensor& relative_values, const OptionalTensor& sink) {
  check_block(block);
  std::vector<Tensor> inputs = with_terms(q, k, v, relative_keys, relative_values, sink);
  inputs.push_back(weights);
  return BlockOperator::call(inputs, block, 0, 0, causal, combine, dropout, seed, key_lengths,
                             segments)[0];
}

Tensor user_balance(const Tensor& scores, std::int64_t iterations, std::string_view form) {
  return BalanceOperator::call({scores}, iterations, form)[0];
}

// The scores with -inf at the pairs of blocks of x that padding and documents mask.
Tensor open_scores(const Tensor& scores, const Tensor& x, std::int64_t block,
                   const OptionalTensor& key_lengths, const OptionalTensor& segments) {
  if (!key_lengths && !segments) return scores;
  const Tensor open = open_block_pairs_op().call(x, block, key_lengths, segments);
  TORCH_CHECK_VALUE(scores.dim() == 4 && scores.sym_size(0) == open.sym_size(0) &&
                        scores.sym_size(2) == open.sym_size(2) &&
                        scores.sym_size(3) == open.sym_size(3),
                    "birkhoff: scores must be [B, H, N, N] with N = ", open.sym_size(3), ", not ",
                    scores.sym_sizes());
  return scores.masked_fill(open.logical_not(), -std::numeric_limits<double>::infinity());
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
  check_options(inputs, {.block = block,
                         .causal = form != "full",
                         .combine = combine,
                         .dropout = dropout,
                         .seed = seed,
                         .key_lengths = key_lengths,
                         .segments = segments});
  const Tensor open = open_scores(scores, q, block, key_lengths, segments);
  return user_sorted(q, k, v, user_balance(open, iterations, form), block,
                     /*causal=*/form != "full", combine, dropout, seed, key_lengths, segments,
                     relative_keys, relative_values, sink);
}

Tensor user_sortcut(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& scores,
                    std::int64_t block, std::int64_t blocks, std::int64_t iterations, bool local,
                    double dropout, const OptionalTensor& seed, const OptionalTensor& key_lengths,
                    const OptionalTensor& relative_keys, const OptionalTensor& relative_values,
                    const OptionalTensor& sink) {
  check_block(block);
  check_between("blocks", blocks, 1, kMaxBlockTokens);
  check_inputs(with_terms(q, k, v, relative_keys, relative_values, sink),
               /*may_have_weights=*/false);
  const Tensor open = open_scores(scores, k, block, key_lengths, std::nullopt);
  std::vector<Tensor> inputs = with_terms(q, k, v, relative_keys, relative_values, sink);
  inputs.push_back(user_balance(open, iterations, "full").slice_symint(2, 0, blocks));
  return SharedOperator::call(inputs, block, local, dropout, seed, key_lengths)[0];
}

Tensor user_sparse_transformer(const Tensor& q, const Tensor& k, const Tensor& v,
                               std::int64_t stride, std::int64_t summary, std::string_view pattern,
                               std::string_view part, bool causal,
                               const OptionalTensor& key_lengths, const OptionalTensor& segments,
                               const OptionalTensor& relative_keys,
                               const OptionalTensor& relative_values, const OptionalTensor& sink) {
  return PatternOperator::call(with_given_terms(q, k, v, relative_keys, relative_values, sink),
                               stride, summary, pattern, part, causal, key_lengths, segments)[0];
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
  const std::vector<Tensor> inputs =
      with_given_terms(q, k, v, relative_keys, relative_values, sink);
  check_options(inputs, {.causal = causal,
                         .dropout = dropout,
                         .seed = seed,
                         .key_lengths = key_lengths,
                         .segments = segments});
  const bool plain = dropout == 0 && !key_lengths && !segments && !relative_keys && !sink;
  if (plain && !fits_kernels(q, k, v)) {
    return at::scaled_dot_product_attention(q, k, v, {}, 0, causal, std::nullopt,
                                            /*enable_gqa=*/q.sym_size(1) != k.sym_size(1));
  }
  return BlockOperator::call(inputs, kWholeSequence, 0, 0, causal, "concat", dropout, seed,
                             key_lengths, segments)[0];
}

}  // namespace

TORCH_LIBRARY(birkhoff, library) {
  const auto define = [&](const std::string& schema) {
    library.def(schema.c_str(), {at::Tag::pt2_compliant_tag});
  };
  const std::string masks = "Tensor? key_lengths=None, Tensor? segments=None",
                    terms =
                        "Tensor? relative_keys=None, Tensor? relative_values=None, "
                        "Tensor? sink=None";
  const std::string options_of_users =
      "float dropout=0.0, Tensor? seed=None, " + masks + ", " + terms;
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
  define(
      "sortcut_attention(Tensor q, Tensor k, Tensor v, Tensor scores, int block, int blocks, "
      "int iterations=5, bool local=False, *, float dropout=0.0, Tensor? seed=None, "
      "Tensor? key_lengths=None, " +
      terms + ") -> Tensor");
  define(
      "sparse_transformer_attention(Tensor q, Tensor k, Tensor v, int stride, int summary=8, "
      "str pattern='fixed', str part='merged', bool causal=True, *, " +
      masks + ", " + terms + ") -> Tensor");
  define("open_block_pairs(Tensor q, int block, *, " + masks + ") -> Tensor");
  define("dense_attention(Tensor q, Tensor k, Tensor v, bool causal=True, *, " + options_of_users +
         ") -> Tensor");

  BlockOperator::define(library);
  BalanceOperator::define(library);
  SharedOperator::define(library);
  PatternOperator::define(library);
}

TORCH_LIBRARY_IMPL(birkhoff, CompositeImplicitAutograd, library) {
  library.impl("block_local_attention", &user_block_local);
  library.impl("sinkhorn_attention", &user_sinkhorn);
  library.impl("sinkhorn_balance", &user_balance);
  library.impl("sorted_attention", &user_sorted);
  library.impl("sortcut_attention", &user_sortcut);
  library.impl("sparse_transformer_attention", &user_sparse_transformer);
  library.impl("dense_attention", &user_dense);
}

TORCH_LIBRARY_IMPL(birkhoff, CPU, library) { library.impl("open_block_pairs", &open_block_pairs); }
TORCH_LIBRARY_IMPL(birkhoff, CUDA, library) { library.impl("open_block_pairs", &open_block_pairs); }

TORCH_LIBRARY_IMPL(birkhoff, Meta, library) {
  library.impl("open_block_pairs", &open_block_pairs_meta);
}

TORCH_LIBRARY_IMPL(birkhoff, Autograd, library) {
  library.impl("open_block_pairs", torch::CppFunction::makeFallthrough());
}

}  // namespace birkhoff::ops
