#include "attention/kernels/clusters/cpu_clusters.h"

#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention/kernels/clusters/cpu_scores.h"
#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/common/cpu_sets.h"
#include "attention/kernels/common/cpu_vector.h"
#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/gathered_attention/cpu_lists.h"

namespace birkhoff {
namespace {

// The rows with the highest scores of each cluster, found in one pass over the rows. A cluster
// keeps up to twice as many rows as it will choose, and a score that any later row must exceed.
template <typename S>
class NearestRows {
 public:
  NearestRows(std::int64_t clusters, std::int64_t window)
      : window_(static_cast<std::size_t>(window)),
        found_(static_cast<std::size_t>(clusters)),
        bars_(static_cast<std::size_t>(clusters), -std::numeric_limits<S>::infinity()) {}

  // scores [K]. Rows come in ascending order.
  void add(std::int32_t row, const S* scores) {
    for (std::size_t c = 0; c < bars_.size(); ++c) {
      const bool is_nan = scores[c] != scores[c];
      if (!(scores[c] > bars_[c]) && !is_nan) continue;
      add_to(c, {is_nan ? std::numeric_limits<S>::infinity() : scores[c], row});
    }
  }

  // Appends the chosen rows of each cluster to `rows` and their ends to `ends`. Forgets them.
  std::int32_t* write(std::int32_t* rows, std::int32_t* first, std::int32_t* ends) {
    for (std::size_t c = 0; c < found_.size(); ++c) {
      shrink(c);
      std::sort(found_[c].begin(), found_[c].end(),
                [](const Found& a, const Found& b) { return a.row < b.row; });
      for (const Found& found : found_[c]) *rows++ = found.row;
      ends[c] = static_cast<std::int32_t>(rows - first);
      found_[c].clear();
      bars_[c] = -std::numeric_limits<S>::infinity();
    }
    return rows;
  }

 private:
  struct Found {
    S score;
    std::int32_t row;
  };
  static bool is_nearer(const Found& a, const Found& b) {
    return a.score != b.score ? a.score > b.score : a.row < b.row;
  }

  void add_to(std::size_t c, Found found) {
    found_[c].push_back(found);
    if (found_[c].size() == 2 * window_) shrink(c);
  }
  void shrink(std::size_t c) {
    std::vector<Found>& all = found_[c];
    if (all.size() <= window_) return;
    const auto last = all.begin() + static_cast<std::ptrdiff_t>(window_) - 1;
    std::nth_element(all.begin(), last, all.end(), is_nearer);
    bars_[c] = last->score;  // a later row with this score is not chosen
    all.resize(window_);
  }

  std::size_t window_;
  std::vector<std::vector<Found>> found_;
  std::vector<S> bars_;
};

// The clusters of the rows of a head.
template <typename T>
struct HeadClusters {
  using S = Sum<T>;

  const ClusterProblem& problem;
  const at::Tensor& centroids_HDK;  // padded
  ClusteredRows& rows;
  const at::Tensor& inverse_BHL;
  std::int64_t H = problem.x_BHLD.size(1), L = problem.x_BHLD.size(2), D = problem.x_BHLD.size(3),
               K = problem.centroids_HKD.size(1);
  ScoreShape shape{static_cast<int>(D), static_cast<int>(K), problem.length};
  std::int64_t padded = shape.padded_clusters<S>();
  const ScoreKernels<T>& kernels = score_kernels<T>(instruction_set());

  void run(Head at) const {
    const at::Tensor& number_BL = problem.documents.number_BL;
    const auto* document =
        number_BL.const_data_ptr<std::int32_t>() + (number_BL.size(0) == 1 ? 0 : at.b) * L;
    const ScratchMemory scratch = scratch_memory(kernels.scratch_bytes(shape.head_dim)),
                        scores =
                            scratch_memory(static_cast<std::size_t>(kTile * padded) * sizeof(S));
    std::int32_t best[kTile];
    S best_score[kTile];
    const std::int64_t head = at.b * H + at.h;
    auto* const cluster = rows.cluster_BHL.mutable_data_ptr<std::int32_t>() + head * L;
    S distance = 0;
    Chosen chosen(*this, head);
    for (std::int64_t first = 0; first < L; first += kTile) {
      const std::int64_t count = std::min<std::int64_t>(kTile, L - first);
      const ScoredRows<T> tile{
          .num_rows = static_cast<int>(count),
          .x = {row_of<T>(problem.x_BHLD, at, first), problem.x_BHLD.stride(2)},
          .unit = {mutable_row_of<T>(rows.unit_BHLD, at, first), rows.unit_BHLD.stride(2)},
          .inverse = inverse_BHL.mutable_data_ptr<S>() + head * L + first,
          .scores = reinterpret_cast<S*>(scores.get()),
          .best = best,
          .best_score = best_score};
      kernels.score(shape, centroids_HDK.const_data_ptr<S>() + at.h * D * padded, tile,
                    scratch.get());
      for (std::int64_t r = 0; r < count; ++r) {
        const bool exists = document[first + r] >= 0;
        cluster[first + r] = exists ? best[r] : -1;
        if (!exists) continue;
        // |u - m|^2, where |u| and |m| are 1; u = 0 for x = 0.
        distance += (tile.inverse[r] == 0 ? 1 : 2) - 2 * best_score[r];
        if (problem.window > 0) {
          chosen.add(document[first + r], static_cast<std::int32_t>(first + r),
                     tile.scores + r * padded);
        }
      }
    }
    if (problem.window > 0) chosen.finish();
    rows.distance_BH.mutable_data_ptr<S>()[head] = distance;
  }

  // Writes the nearest rows of one document after the other.
  class Chosen {
   public:
    Chosen(const HeadClusters& clusters, std::int64_t head)
        : documents_(clusters.problem.documents.count),
          clusters_(clusters.K),
          nearest_(clusters.K, std::max<std::int64_t>(clusters.problem.window, 1)) {
      if (clusters.problem.window == 0) return;
      first_ = next_ = clusters.rows.nearest_BHP.template mutable_data_ptr<std::int32_t>() +
                       head * clusters.rows.nearest_BHP.size(2);
      ends_ = clusters.rows.nearest_ends_BHG.template mutable_data_ptr<std::int32_t>() +
              head * documents_ * clusters_;
    }
    void add(std::int32_t document, std::int32_t row, const S* scores) {
      while (document_ < document) close();
      nearest_.add(row, scores);
    }
    void finish() {
      while (document_ < documents_) close();
    }

   private:
    void close() {
      next_ = nearest_.write(next_, first_, ends_ + document_ * clusters_);
      ++document_;
    }

    std::int64_t documents_, clusters_, document_ = 0;
    NearestRows<S> nearest_;
    std::int32_t *first_ = nullptr, *next_ = nullptr, *ends_ = nullptr;
  };
};

// The maximum number of slots that the lists of a head may need.
std::int64_t most_slots(const ClusterProblem& problem) {
  const at::Tensor& number_BL = problem.documents.number_BL;
  const std::int64_t L = number_BL.size(1), K = problem.centroids_HKD.size(1);
  std::int64_t most = 0;
  for (std::int64_t b = 0; b < number_BL.size(0); ++b) {
    const auto* document = number_BL.const_data_ptr<std::int32_t>() + b * L;
    std::int64_t slots = 0;
    for (std::int64_t first = 0; first < L && document[first] >= 0;) {
      std::int64_t end = first;
      while (end < L && document[end] == document[first]) ++end;
      slots += K * std::min(problem.window, end - first);
      first = end;
    }
    most = std::max(most, slots);
  }
  return most;
}

// Calls work(head) for each head of each sample.
template <typename Work>
void for_each_head(std::int64_t B, std::int64_t H, const Work& work) {
  at::parallel_for(0, B * H, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t head = begin; head < end; ++head) work(Head{head / H, head % H});
  });
}

}  // namespace

template <typename T>
const ScoreKernels<T>& score_kernels(InstructionSet set) {
  return for_set(set, []<InstructionSet kSet>() -> const ScoreKernels<T>& {
    // No kernel here multiplies pairs of bf16.
    return compiled_score_kernels<kSetOf<kSet, /*kIsBf16=*/false>, T>();
  });
}

template const ScoreKernels<float>& score_kernels(InstructionSet);
template const ScoreKernels<double>& score_kernels(InstructionSet);
template const ScoreKernels<Bf16>& score_kernels(InstructionSet);

at::Tensor cluster_rows_on_cpu(const ClusterProblem& problem, ClusteredRows& rows) {
  ClusterProblem fitting = problem;
  fitting.x_BHLD = with_contiguous_rows(problem.x_BHLD.detach());
  const at::Tensor& x = fitting.x_BHLD;
  const std::int64_t B = x.size(0), H = x.size(1), L = x.size(2);
  const at::TensorOptions sums = problem.centroids_HKD.options(), numbers = sums.dtype(at::kInt);
  rows.unit_BHLD = at::empty_like(x);
  rows.distance_BH = at::empty({B, H}, sums);
  rows.cluster_BHL = at::empty({B, H, L}, numbers);
  if (problem.window > 0) {
    rows.nearest_BHP = at::zeros({B, H, most_slots(problem)}, numbers);
    rows.nearest_ends_BHG =
        at::empty({B, H, problem.documents.count * problem.centroids_HKD.size(1)}, numbers);
  }
  const at::Tensor inverse_BHL = at::empty({B, H, L}, sums);
  dispatch_tile_type(x.scalar_type(), [&]<typename T>(T) {
    const ScoreShape shape{.clusters = static_cast<int>(problem.centroids_HKD.size(1))};
    const at::Tensor centroids_HDK =
        at::constant_pad_nd(problem.centroids_HKD.transpose(1, 2),
                            {0, shape.padded_clusters<Sum<T>>() - shape.clusters})
            .contiguous();
    const HeadClusters<T> clusters{fitting, centroids_HDK, rows, inverse_BHL};
    for_each_head(B, H, [&](Head head) { clusters.run(head); });
  });
  return inverse_BHL;
}

at::Tensor cluster_gradients_on_cpu(const ClusterGradientProblem& problem) {
  const at::Tensor& unit = problem.unit_BHLD;
  const std::int64_t B = unit.size(0), H = unit.size(1), L = unit.size(2), D = unit.size(3),
                     K = problem.centroids_HKD.size(1);
  const at::Tensor d_unit =
      problem.d_unit_BHLD.defined() ? with_contiguous_rows(problem.d_unit_BHLD) : at::Tensor();
  const at::Tensor d_distance = problem.d_distance_BH.defined()
                                    ? problem.d_distance_BH.contiguous()
                                    : at::zeros({B, H}, problem.centroids_HKD.options());
  const at::Tensor centroids = problem.centroids_HKD.contiguous();
  const at::Tensor d_x = at::empty_like(unit);
  dispatch_tile_type(unit.scalar_type(), [&]<typename T>(T) {
    using S = Sum<T>;
    const ScoreKernels<T>& kernels = score_kernels<T>(instruction_set());
    const ScoreShape shape{static_cast<int>(D), static_cast<int>(K), problem.length};
    for_each_head(B, H, [&](Head at) {
      const ScratchMemory scratch = scratch_memory(kernels.scratch_bytes(shape.head_dim));
      const std::int64_t head = at.b * H + at.h;
      const auto* cluster = problem.cluster_BHL.const_data_ptr<std::int32_t>() + head * L;
      for (std::int64_t row = 0; row < L; ++row) {
        const bool exists = cluster[row] >= 0;
        kernels.row_gradient(
            shape,
            {.unit = row_of<T>(unit, at, row),
             .d_unit = d_unit.defined() ? row_of<T>(d_unit, at, row) : nullptr,
             .inverse = problem.inverse_BHL.const_data_ptr<S>()[head * L + row],
             .d_distance = exists ? d_distance.const_data_ptr<S>()[head] : S{0},
             .centroid =
                 exists ? centroids.const_data_ptr<S>() + (at.h * K + cluster[row]) * D : nullptr,
             .d_x = mutable_row_of<T>(d_x, at, row)},
            scratch.get());
      }
    });
  });
  return d_x;
}

at::Tensor cluster_sums_on_cpu(const ClusterProblem& problem, const ClusteredRows& rows) {
  const at::Tensor unit = with_contiguous_rows(rows.unit_BHLD.detach());
  const std::int64_t B = unit.size(0), H = unit.size(1), L = unit.size(2), D = unit.size(3),
                     K = problem.centroids_HKD.size(1);
  const at::Tensor sums = at::zeros({H, K, D + 1}, problem.centroids_HKD.options());
  dispatch_tile_type(unit.scalar_type(), [&]<typename T>(T) {
    using S = Sum<T>;
    for_each_head(1, H, [&](Head at) {
      S* const of_head = sums.mutable_data_ptr<S>() + at.h * K * (D + 1);
      for (std::int64_t b = 0; b < B; ++b) {
        const auto* cluster = rows.cluster_BHL.const_data_ptr<std::int32_t>() + (b * H + at.h) * L;
        for (std::int64_t row = 0; row < L; ++row) {
          if (cluster[row] < 0) continue;
          S* const sum = of_head + cluster[row] * (D + 1);
          const T* const x = row_of<T>(unit, {b, at.h}, row);
          for (std::int64_t d = 0; d < D; ++d) sum[d] += to_sum(x[d]);
          sum[D] += 1;
        }
      }
      for (std::int64_t c = 0; c < K; ++c) {
        for (std::int64_t d = 0; d < D; ++d) {
          of_head[c * (D + 1) + d] /= static_cast<S>(problem.length);
        }
      }
    });
  });
  return sums;
}

}  // namespace birkhoff
