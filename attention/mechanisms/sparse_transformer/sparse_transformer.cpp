// The attention of the Sparse Transformer (Child et al. 2019, sections 4.2 and 4.3). A causal query
// i sees the keys j of two parts:
//
//   fixed:    floor(j / l) = floor(i / l);   j mod l >= l - c, the summaries
//   strided:  0 <= i - j < l;                (i - j) mod l = 0
//
// with j <= i. An encoder drops j <= i, and its window is |i - j| < l. Positions count from the
// start of the sequence, also where documents hide keys.
//
// Each part is attention over gathered rows, whose lists depend on the length only. The lists hold
// no key twice, so that the parts merge into one softmax: summaries are not in the lists of blocks,
// and multiples of l in the window are not in those of columns. Cost: L (l + L c / l) or
// L (l + L / l) pairs.
//
// Legend: B batch, H heads, L tokens, W listed tokens.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "attention/kernels/clusters/cluster_lists.h"
#include "attention/key_value_cache.h"
#include "attention/mechanisms/table.h"
#include "cluster/base/error.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

using SparseConfig = configs::SparseTransformerAttention;

// The rows of a list, segment by segment.
struct Segments {
  std::vector<std::int32_t> rows{}, ends{};

  // Adds rows first, first + step, .. below `end` to the last segment.
  void add(std::int64_t first, std::int64_t end, std::int64_t step = 1) {
    for (std::int64_t row = first; row < end; row += step) {
      rows.push_back(static_cast<std::int32_t>(row));
    }
  }
  void close() { ends.push_back(static_cast<std::int32_t>(rows.size())); }

  RowLists lists(std::int64_t num_rows, at::Device device) const {
    const auto tensor = [](const std::vector<std::int32_t>& values) {
      return at::tensor(values, at::kInt).view({1, 1, -1});
    };
    RowLists made = make_row_lists(tensor(rows), tensor(ends), num_rows);
    for (at::Tensor* each : {&made.rows_BHP, &made.ends_BHG, &made.order_BHP, &made.starts_BHR}) {
      *each = each->to(device);
    }
    return made;
  }
};

class SparseTransformerAttention final : public Mechanism {
 public:
  explicit SparseTransformerAttention(const MakeArguments& m)
      : shape_(m.shape),
        strided_(m.config.sparse_transformer().pattern() == SparseConfig::strided),
        merged_(m.config.sparse_transformer().part() == SparseConfig::merged),
        stride_(m.config.sparse_transformer().stride()),
        dropout_(m.config.sparse_transformer().dropout()),
        terms_(m.terms) {
    const std::int64_t summary = m.config.sparse_transformer().summary();
    summary_ = std::min(summary > 0 ? summary : std::max<std::int64_t>(stride_ / 16, 1), stride_);
  }

  AttentionOutput attend(const AttentionInput& in, Path limit) const override {
    require(in.q_BHLD.size(2) == in.k_BHSD.size(2),
            "the Sparse Transformer needs as many keys as queries");
    const Documents documents(in.segments_q_BL, /*lengths_B=*/{}, in.q_BHLD);
    std::vector<AttentionPart> parts;
    for (GatheredRows& rows : rows_of_parts(in.q_BHLD.size(2), in.q_BHLD.device())) {
      hide_other_documents(documents, rows.band);
      GatheredAttention attention{.q_BHLD = in.q_BHLD,
                                  .k_BHSD = in.k_BHSD,
                                  .v_BHSD = in.v_BHSD,
                                  .rows = std::move(rows),
                                  .key_lengths_B = in.key_lengths_B,
                                  .relative = terms_.relative(in.q_BHLD),
                                  .dropout = dropout_,
                                  .noise = in.noise};
      if (in.noise) {  // each part has a stream of its own
        const auto stream = static_cast<std::uint32_t>(parts.size()) << 29;
        attention.noise = in.noise->at_layer(in.noise->layer | stream);
      }
      parts.push_back(attend_gathered(attention, limit));
    }
    const AttentionPart part = parts.size() == 1 ? parts.front() : merge_parts(parts);
    const at::Tensor sink_H = terms_.sink(in.q_BHLD);
    return {sink_H.defined() ? with_sink(part, sink_H).out_BHLD : part.out_BHLD, {}};
  }

  MechanismTraits traits() const override {
    // The first queries of a decoder have no summary before them.
    const bool skips = !merged_ && !strided_;
    return {.causal = shape_.causal,
            .exact_in_decoding = shape_.causal,
            .convex = !skips && terms_.is_convex(),
            .skips_queries = skips,
            .takes_relative_positions = true};
  }

  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    return sees(at::arange(num_queries).unsqueeze(1), at::arange(num_keys));
  }

  double forward_flops(std::int64_t num_tokens) const override {
    double pairs = 0;
    for (std::int64_t i = 0; i < num_tokens; ++i) {
      pairs += static_cast<double>(num_visible(i, num_tokens));
    }
    return 4 * pairs * static_cast<double>(shape_.heads * shape_.head_dim) +
           static_cast<double>(num_tokens * shape_.heads) * terms_.forward_flops();
  }

  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override {
    if (!shape_.causal) return Mechanism::decode_state(batch);
    return std::make_unique<KeyValueState>();
  }

  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override {
    KeyValueCache& cache = static_cast<KeyValueState&>(state).cache;
    cache.append(in.k_BHSD, in.v_BHSD);
    const std::int64_t size = cache.size();
    const at::Tensor seen_S = sees(at::full({1}, size - 1, at::kLong), at::arange(size));
    const at::Tensor token_W = at::nonzero(seen_S).squeeze(1).to(in.q_BHLD.device());
    if (token_W.numel() == 0) return at::zeros_like(in.q_BHLD);
    const at::Tensor token_BH1W = token_W.expand({in.k_BHSD.size(0), in.k_BHSD.size(1), 1, -1});
    return terms_.attend_listed(in.q_BHLD, cache.keys(0, size), cache.values(0, size), token_BH1W,
                                at::ones_like(token_BH1W, at::kBool), size - 1,
                                SlotMerge::kOneSoftmax);
  }

 private:
  // bool: whether the queries see the keys; int64, broadcastable.
  at::Tensor sees(const at::Tensor& query, const at::Tensor& key) const {
    const at::Tensor distance = query - key;
    at::Tensor first, second;
    if (strided_) {
      first = distance.abs() < stride_;
      second = distance.remainder(stride_) == 0;
    } else {
      first = at::div(query, stride_, "floor") == at::div(key, stride_, "floor");
      second = (key.remainder(stride_) >= stride_ - summary_).expand_as(distance);
    }
    const at::Tensor either = merged_ ? at::logical_or(first, second) : second;
    return shape_.causal ? at::logical_and(either, distance >= 0) : either;
  }

  // The number of keys that query i of L sees.
  std::int64_t num_visible(std::int64_t i, std::int64_t L) const {
    const std::int64_t end = shape_.causal ? i + 1 : L;
    if (strided_) {
      const std::int64_t multiples = i / stride_ + (end - 1 - i) / stride_;
      const std::int64_t window =
          std::min(i + stride_, end) - std::max<std::int64_t>(i + 1 - stride_, 0);
      return multiples + (merged_ ? window : 1);
    }
    const auto summaries_before = [&](std::int64_t j) {
      return j / stride_ * summary_ + std::max<std::int64_t>(j % stride_ - stride_ + summary_, 0);
    };
    if (!merged_) return summaries_before(end);
    const std::int64_t first = i / stride_ * stride_, last = std::min(first + stride_, end);
    return summaries_before(end) + last - first - summaries_before(last) + summaries_before(first);
  }

  GatheredRows part(const Segments& queries, const Segments& keys, std::int64_t num_tokens,
                    at::Device device, DistanceBand band = {}) const {
    if (shape_.causal) band.least = std::max<std::int64_t>(band.least, 0);
    return {queries.lists(num_tokens, device), keys.lists(num_tokens, device), band};
  }

  // The keys of each block that are no summaries, for its own queries; summaries for all queries.
  std::vector<GatheredRows> fixed_parts(std::int64_t L, at::Device device) const {
    Segments blocks, others, sequence, summaries;
    for (std::int64_t first = 0; first < L; first += stride_) {
      const std::int64_t end = std::min(first + stride_, L),
                         first_summary = std::min(first + stride_ - summary_, L);
      blocks.add(first, end);
      blocks.close();
      others.add(first, first_summary);
      others.close();
      summaries.add(first_summary, end);
    }
    sequence.add(0, L);
    sequence.close();
    summaries.close();
    std::vector<GatheredRows> parts;
    if (merged_ && !others.rows.empty()) parts.push_back(part(blocks, others, L, device));
    if (!merged_ || !summaries.rows.empty()) {
      parts.push_back(part(sequence, summaries, L, device));
    }
    return parts;
  }

  // Windows, and columns of tokens that are multiples of l apart.
  std::vector<GatheredRows> strided_parts(std::int64_t L, at::Device device) const {
    constexpr std::int64_t kTile = 64;  // queries that the kernels take together
    const std::int64_t together = std::max(stride_, kTile);
    Segments queries, near, columns;
    for (std::int64_t first = 0; first < L; first += together) {
      const std::int64_t end = std::min(first + together, L);
      queries.add(first, end);
      queries.close();
      near.add(std::max<std::int64_t>(first + 1 - stride_, 0),
               shape_.causal ? end : std::min(end - 1 + stride_, L));
      near.close();
    }
    for (std::int64_t first = 0; first < std::min(stride_, L); ++first) {
      columns.add(first, L, stride_);
      columns.close();
    }
    if (!merged_) return {part(columns, columns, L, device)};
    std::vector<GatheredRows> parts{
        part(queries, near, L, device, {.least = 1 - stride_, .most = stride_ - 1})};
    if (L <= stride_) return parts;
    parts.push_back(part(columns, columns, L, device, {.least = stride_}));
    if (!shape_.causal) parts.push_back(part(columns, columns, L, device, {.most = -stride_}));
    return parts;
  }

  // The lists of the parts. They are kept, because making them costs time on the host, and recorded
  // steps of a GPU read them.
  std::vector<GatheredRows> rows_of_parts(std::int64_t L, at::Device device) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<GatheredRows>& parts = parts_of_length_[L];
    if (parts.empty() || parts.front().queries.rows_BHP.device() != device) {
      parts = strided_ ? strided_parts(L, device) : fixed_parts(L, device);
    }
    return parts;
  }

  const MechanismShape shape_;
  const bool strided_, merged_;
  const std::int64_t stride_;  // l
  std::int64_t summary_ = 0;   // c
  const float dropout_;
  const LogitTerms terms_;
  mutable std::mutex mutex_;  // of the lists
  mutable std::map<std::int64_t, std::vector<GatheredRows>> parts_of_length_;
};

}  // namespace

std::unique_ptr<Mechanism> make_sparse_transformer(const MakeArguments& m) {
  return std::make_unique<SparseTransformerAttention>(m);
}

}  // namespace birkhoff
