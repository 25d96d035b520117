// Legend: B batch, H heads, L queries, S keys, D head dim.
#include "attention/mechanisms/dense/dense.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <utility>
#include <vector>

#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/masked_softmax.h"
#include "attention/key_value_cache.h"
#include "attention/mechanisms/table.h"
#include "cluster/base/error.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

// Whether LibTorch's own kernel is faster on the CPU. Several tiles of wide rows do not fit a
// core's caches, and LibTorch's larger products wait less for memory
// (docs/benchmarks/attention_cpu.md).
bool library_is_faster(const at::Tensor& q_BHLD, bool causal) {
  constexpr std::int64_t kHeadDim = 192, kTokens = 512;
  return !causal && q_BHLD.scalar_type() == at::kFloat && q_BHLD.size(3) > kHeadDim &&
         q_BHLD.size(2) > kTokens;
}

// bool [L, S] for queries that are the last L of S tokens, created on the input's device: a copy
// from the host would wait for the device.
at::Tensor earlier_keys(const AttentionInput& in) {
  const std::int64_t L = in.q_BHLD.size(2), S = in.k_BHSD.size(2);
  return at::ones({L, S}, in.q_BHLD.options().dtype(at::kBool)).tril_(S - L);
}

Normalizer kind_of(configs::DenseAttention::Normalizer normalizer) {
  switch (normalizer) {
    case configs::DenseAttention::softmax:
      return Normalizer::kSoftmax;
    case configs::DenseAttention::top_k:
      return Normalizer::kTopK;
    case configs::DenseAttention::sparsemax:
      return Normalizer::kSparsemax;
    case configs::DenseAttention::entmax15:
      return Normalizer::kEntmax15;
    case configs::DenseAttention::entmax:
      return Normalizer::kEntmax;
  }
  return {};
}

}  // namespace

DenseAttention::DenseAttention(const configs::DenseAttention& config, const MechanismShape& shape,
                               const std::string& prefix, Parameters& parameters,
                               const LogitTerms& terms)
    : shape_(shape),
      dropout_(config.dropout()),
      terms_(terms),
      normalizer_{.kind = kind_of(config.normalizer()),
                  .top_k = config.kept_keys(),
                  .top_divisor = config.kept_divisor(),
                  .keep_ties = config.keep_ties(),
                  .alpha_H = {}},
      only_in_training_(config.only_in_training()) {
  if (shape.distances) distances_.emplace(shape, prefix, parameters);
  if (normalizer_.kind != Normalizer::kEntmax) return;
  exponent_H_ = parameters.add_of_heads(prefix + ".exponent", {shape.heads}, Initializer::zeros(),
                                        /*decay=*/false);
}

RowNormalizer DenseAttention::normalizer(bool trains) const {
  if (only_in_training_ && !trains) return {};
  RowNormalizer normalizer = normalizer_;
  if (exponent_H_.defined()) normalizer.alpha_H = 1 + exponent_H_.sigmoid();
  return normalizer;
}

at::Tensor DenseAttention::key_mask(const AttentionInput& in) const {
  at::Tensor mask;
  if (in.key_lengths_B.defined()) {
    const at::Tensor index_S = at::arange(in.k_BHSD.size(2), in.key_lengths_B.options());
    mask = index_S < in.key_lengths_B.view({-1, 1, 1, 1});
  }
  if (in.segments_q_BL.defined()) {
    const at::Tensor same_B1LS = (in.segments_q_BL.unsqueeze(-1) == in.segments_kv_BS.unsqueeze(1));
    mask = and_defined(mask, same_B1LS.unsqueeze(1));
  }
  return mask;
}

AttentionOutput DenseAttention::attend(const AttentionInput& in, Path limit) const {
  require(!shape_.causal || distances_ || in.q_BHLD.size(2) == in.k_BHSD.size(2),
          "causal attention needs as many keys as queries");
  const RowAttention rows = rows_of(in);
  const PathChoice choice = choose(in, rows, limit);
  const bool sparse = rows.normalizer.kind != Normalizer::kSoftmax;
  if (choice == Path::kFused && !sparse) {  // its kernels record their choice
    if (!choice.why.empty()) take_path("dense attention", choice);
    return {fused(in), {}};
  }
  switch (take_path("dense attention", choice)) {
    case Path::kReference:
      return {reference(in, rows), {}};
    case Path::kSdpa:
      return {by_library(in), {}};
    case Path::kFused:
      return {fused_sparse(in, rows), {}};
  }
  return {};
}

PathChoice DenseAttention::choose(const AttentionInput& in, const RowAttention& rows,
                                  Path limit) const {
  const at::Tensor& q = in.q_BHLD;
  if (rows.normalizer.kind != Normalizer::kSoftmax) {
    if (limit != Path::kFused) return {Path::kReference};
    if (terms_.sink(q).defined()) return {Path::kReference, "only softmax has kernels with sinks"};
    return fused_unless(why_not_row_kernels(rows));
  }
  const bool drops = in.noise && dropout_ > 0, has_sinks = terms_.sink(q).defined();
  if (distances_) {
    if (limit != Path::kFused) return {Path::kReference};
    return fused_unless(why_not_distances(in));
  }
  // LibTorch's fused kernels cannot use our noise, and have no sinks.
  const Path other =
      limit == Path::kReference || drops || has_sinks ? Path::kReference : Path::kSdpa;
  if (limit != Path::kFused) return {other};
  switch (kernel_device(q)) {
    case KernelDevice::kNone:
      return {other, kNoKernels};
    case KernelDevice::kGpu: {
      if (drops) break;  // as one block, with the CPU's noise
      const bool masks = in.segments_q_BL.defined() || in.key_lengths_B.defined();
      if (!masks && !has_sinks) return {other};  // LibTorch's kernels are the fastest there
      std::string why = choose_one_segment(in).why;
      if (why.empty()) return {Path::kFused};
      if (has_sinks) return {other, std::move(why)};
      return {other,
              fmt::format("{} a mask of all pairs of tokens: {}",
                          in.segments_q_BL.defined() ? "documents need" : "padding needs", why)};
    }
    case KernelDevice::kCpu:
      break;
  }
  if (q.size(2) != in.k_BHSD.size(2)) return {other, "queries and keys are of two sequences"};
  if (other == Path::kSdpa && library_is_faster(q, shape_.causal)) return {other};
  const PathChoice ours = choose_path(as_one_block(in), limit);
  if (ours != Path::kFused) return {other, ours.why};
  if (kernel_device(q) == KernelDevice::kGpu && in.segments_q_BL.defined()) {
    return {ours.path, "dropout with documents needs a mask of all pairs of tokens"};
  }
  return {ours.path};
}

at::Tensor DenseAttention::add_distances(RowAttention& rows) const {
  if (!distances_) return {};
  const bool trains = rows.noise.has_value();
  distances_->add_to(rows, trains);
  return distances_->first_keys(rows.q_BHLD.size(2), rows.k_BHSD.size(2), trains,
                                rows.q_BHLD.device());
}

at::Tensor DenseAttention::reference(const AttentionInput& in, RowAttention rows) const {
  at::Tensor mask = key_mask(in);
  if (shape_.causal) mask = and_defined(mask, earlier_keys(in));
  if (const at::Tensor first_1L = add_distances(rows); first_1L.defined()) {
    const at::Tensor key_S = at::arange(in.k_BHSD.size(2), first_1L.options());
    mask = and_defined(mask, key_S >= first_1L.view({-1, 1}));
  }
  return reference_rows(rows, mask, terms_.sink(in.q_BHLD));
}

at::Tensor DenseAttention::fused_sparse(const AttentionInput& in, RowAttention rows) const {
  set_key_ranges(rows, shape_.causal, in.key_lengths_B, in.segments_q_BL, in.segments_kv_BS);
  if (const at::Tensor first_1L = add_distances(rows); first_1L.defined()) {
    rows.first_BL = rows.first_BL.maximum(first_1L);
  }
  rows.q_BHLD = rows.q_BHLD.to(in.q_BHLD.scalar_type());
  return attend_rows(rows);
}

at::Tensor DenseAttention::by_library(const AttentionInput& in) const {
  at::Tensor mask = key_mask(in);
  if (!mask.defined()) {
    return library_attention(in.q_BHLD, in.k_BHSD, in.v_BHSD, {}, shape_.causal);
  }
  if (shape_.causal) mask = at::logical_and(mask, earlier_keys(in));
  const at::Tensor bias = additive_mask(mask, in.q_BHLD.scalar_type());
  const at::Tensor out_BHLD = library_attention(in.q_BHLD, in.k_BHSD, in.v_BHSD, bias);
  return out_BHLD.masked_fill(mask.any(-1, /*keepdim=*/true).logical_not(), 0);
}

GatheredAttention as_one_segment(const AttentionInput& in, bool causal, const at::Tensor& sink_H,
                                 at::Device device) {
  const auto all_rows = [&](std::int64_t count) {
    const at::TensorOptions numbers = at::TensorOptions(device).dtype(at::kInt);
    const at::Tensor rows_11L = at::arange(count, numbers).view({1, 1, -1});
    return make_permuted_lists(rows_11L, at::full({1, 1, 1}, count, numbers), rows_11L,
                               /*whole=*/true);
  };
  const std::int64_t L = in.q_BHLD.size(2), S = in.k_BHSD.size(2);
  const RowLists queries = all_rows(L);
  GatheredAttention attention{.q_BHLD = in.q_BHLD,
                              .k_BHSD = in.k_BHSD,
                              .v_BHSD = in.v_BHSD,
                              .rows = {queries, S == L ? queries : all_rows(S), {}},
                              .key_lengths_B = in.key_lengths_B,
                              .sink_H = sink_H};
  DistanceBand& band = attention.rows.band;
  if (causal) band.least = L - S;
  if (in.segments_q_BL.defined() && !device.is_meta()) {
    separate_documents(document_numbers(in.segments_q_BL), band);
  }
  return attention;
}

std::string DenseAttention::why_not_documents(const AttentionInput& in) {
  if (!in.segments_q_BL.defined()) return "";
  if (!in.segments_kv_BS.is_same(in.segments_q_BL)) {
    return "queries and keys have documents of their own";
  }
  const std::int64_t L = in.q_BHLD.size(2);
  if (fit_document_positions(L, L)) return "";
  return fmt::format("positions in documents of {} tokens do not fit 32 bits", L);
}

std::string DenseAttention::why_not_distances(const AttentionInput& in) const {
  if (kernel_device(in.q_BHLD) == KernelDevice::kNone) return kNoKernels;
  if (in.noise && dropout_ > 0)
    return "softmax with dropout and sinusoidal distances has no kernels";
  const PathChoice choice = choose_one_segment(in);
  return choice == Path::kFused ? "" : choice.why;
}

PathChoice DenseAttention::choose_one_segment(const AttentionInput& in) const {
  if (std::string why = why_not_documents(in); !why.empty()) return {Path::kReference, why};
  return choose_path(as_one_segment(in, shape_.causal, terms_.sink(in.q_BHLD), at::kMeta),
                     Path::kFused);
}

BlockAttention DenseAttention::as_one_block(const AttentionInput& in) const {
  return {.q_BHNbD = in.q_BHLD.unsqueeze(2),
          .keys = {{.k_BHNbD = in.k_BHSD.unsqueeze(2),
                    .v_BHNbD = in.v_BHSD.unsqueeze(2),
                    .window = {.causal = shape_.causal},
                    .mask_BHNbb = {at::Tensor()},
                    .bias_BHNbb = {}}},
          .dropout = dropout_,
          .noise = in.noise,
          .sink_H = terms_.sink(in.q_BHLD)};
}

RowAttention DenseAttention::rows_of(const AttentionInput& in) const {
  return {.q_BHLD = in.q_BHLD,
          .k_BHSD = in.k_BHSD,
          .v_BHSD = in.v_BHSD,
          .first_BL = {},
          .end_BL = {},
          .normalizer = normalizer(in.noise.has_value()),
          .dropout = dropout_,
          .noise = in.noise};
}

at::Tensor DenseAttention::fused(const AttentionInput& in) const {
  const bool drops = in.noise && dropout_ > 0;
  if (distances_ || (kernel_device(in.q_BHLD) == KernelDevice::kGpu && !drops)) {
    const at::Tensor& q = in.q_BHLD;
    GatheredAttention attention = as_one_segment(in, shape_.causal, terms_.sink(q), q.device());
    if (distances_) distances_->add_to(attention, in.noise.has_value());
    return attend_gathered(attention, Path::kFused).out_BHLD;
  }
  BlockAttention attention = as_one_block(in);
  const at::Tensor mask = key_mask(in);
  if (mask.defined()) attention.keys[0].mask_BHNbb = {mask.unsqueeze(2)};
  return attend_in_blocks(attention, Path::kFused).squeeze(2);
}

MechanismTraits DenseAttention::traits() const {
  return {.causal = shape_.causal,
          .exact_in_decoding = shape_.causal,
          .supports_cross_attention = !shape_.causal,
          .supports_sets = !shape_.causal,
          .convex = terms_.is_convex(),
          .selects = normalizer_.kind != Normalizer::kSoftmax,
          .discontinuous = normalizer_.kind == Normalizer::kTopK,
          .takes_sinusoidal_distances = shape_.causal,
          .quadratic = true};
}

at::Tensor DenseAttention::visible_keys(std::int64_t num_queries, std::int64_t num_keys) const {
  require(!shape_.causal || num_queries == num_keys,
          "causal attention needs as many keys as queries");
  const at::Tensor all = at::ones({num_queries, num_keys}, at::kBool);
  return shape_.causal ? at::tril(all) : all;
}

double DenseAttention::forward_flops(std::int64_t num_tokens) const {
  const double n = static_cast<double>(num_tokens);
  const double pairs = shape_.causal ? n * (n + 1) / 2 : n * n;
  const double flops = 4 * pairs * static_cast<double>(shape_.heads * shape_.head_dim);
  return flops + (distances_ ? distances_->forward_flops(num_tokens) : 0);
}

std::unique_ptr<DecodeState> DenseAttention::decode_state(std::int64_t batch) const {
  if (!shape_.causal) return Mechanism::decode_state(batch);
  return std::make_unique<KeyValueState>();
}

at::Tensor DenseAttention::decode_step(DecodeState& state, const AttentionInput& in) const {
  KeyValueCache& cache = static_cast<KeyValueState&>(state).cache;
  cache.append(in.k_BHSD, in.v_BHSD);
  if (distances_) {
    AttentionInput all = in;
    all.k_BHSD = cache.keys(0, cache.size());
    all.v_BHSD = cache.values(0, cache.size());
    return reference(all, rows_of(all));
  }
  return terms_.attend(in.q_BHLD, cache.keys(0, cache.size()), cache.values(0, cache.size()),
                       cache.size(), normalizer(/*trains=*/false));
}

std::unique_ptr<Mechanism> make_dense(const MakeArguments& m) {
  return std::make_unique<DenseAttention>(m.config.dense(), m.shape, m.prefix, m.parameters,
                                          m.terms);
}

}  // namespace birkhoff
