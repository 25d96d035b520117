// Legend: see block_top_k.h; S is the type of sums.
#include "attention/kernels/block_top_k/cpu_top_k.h"

#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/kernels/clusters/cpu_scores.h"
#include "attention/kernels/common/cpu_dtype.h"
#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/gathered_attention/cpu_lists.h"

namespace birkhoff {
namespace {

template <typename T>
struct ChoiceCall {
  using S = Sum<T>;

  const BlockTopK& choice;
  at::Tensor q_BHLD, mean_BHDN, document_BN, chosen_BHLC;
  std::int64_t H = q_BHLD.size(1), L = q_BHLD.size(2), D = q_BHLD.size(3), N = document_BN.size(1),
               C = chosen_BHLC.size(3);
  ScoreShape shape{static_cast<int>(D), static_cast<int>(N)};
  std::int64_t padded = shape.padded_clusters<S>();
  const ScoreKernels<T>& kernels = score_kernels<T>(instruction_set());

  // A thread's memory.
  struct Worker {
    ScratchMemory scratch, scores, unit;
    std::vector<std::int32_t> best;
    std::vector<S> numbers;
  };

  Worker worker() const {
    const auto bytes = [](std::int64_t count, std::size_t size) {
      return scratch_memory(static_cast<std::size_t>(count) * size);
    };
    return {scratch_memory(kernels.scratch_bytes(shape.head_dim)), bytes(kTile * padded, sizeof(S)),
            bytes(kTile * D, sizeof(T)), std::vector<std::int32_t>(kTile),
            std::vector<S>(static_cast<std::size_t>(2 * kTile))};
  }

  // The queries [first, ..) of a head. The length of a query does not change which products are the
  // largest, so the kernel may scale it to 1.
  void choose(Head head, std::int64_t first, Worker& worker) const {
    const auto count = static_cast<int>(std::min<std::int64_t>(kTile, L - first));
    const auto* number_BL = choice.documents.number_BL.const_data_ptr<std::int32_t>();
    const auto* number = number_BL + (choice.documents.number_BL.size(0) == 1 ? 0 : head.b * L);
    const auto* document =
        document_BN.const_data_ptr<std::int32_t>() + (document_BN.size(0) == 1 ? 0 : head.b * N);
    const ScoredRows<T> tile{.num_rows = count,
                             .x = {row_of<T>(q_BHLD, head, first), q_BHLD.stride(2)},
                             .unit = {reinterpret_cast<T*>(worker.unit.get()), D},
                             .inverse = worker.numbers.data(),
                             .scores = reinterpret_cast<S*>(worker.scores.get()),
                             .best = worker.best.data(),
                             .best_score = worker.numbers.data() + kTile};
    const std::int64_t head_number = head.b * H + head.h;
    kernels.score(shape, mean_BHDN.const_data_ptr<S>() + head_number * D * padded, tile,
                  worker.scratch.get());
    auto* chosen = chosen_BHLC.mutable_data_ptr<std::int32_t>() + (head_number * L + first) * C;
    for (int i = 0; i < count; ++i) {
      const std::int64_t own = (first + i) / choice.block;
      choose_of_row(tile.scores + i * padded, own, number[first + i], document, chosen + i * C);
    }
  }

  // Keeps the best C blocks so far in order.
  void choose_of_row(const S* scores, std::int64_t own, std::int32_t number,
                     const std::int32_t* document, std::int32_t* chosen) const {
    std::fill_n(chosen, C, -1);
    if (number < 0) return;
    const auto score = [&](std::int32_t n) {
      return scores[n] != scores[n] ? std::numeric_limits<S>::infinity() : scores[n];
    };
    const std::int64_t end = choice.causal ? std::min(own, N) : N;
    std::int64_t found = 0;
    for (std::int32_t n = 0; n < end; ++n) {
      if (n == own || document[n] != number) continue;
      const S of_n = score(n);
      std::int64_t place = found;
      while (place > 0 && of_n > score(chosen[place - 1])) --place;
      if (place == C) continue;
      found = std::min(found + 1, C);
      std::copy_backward(chosen + place, chosen + found - 1, chosen + found);
      chosen[place] = n;
    }
  }

  void run() const {
    const std::int64_t tiles = (L + kTile - 1) / kTile;
    at::parallel_for(0, q_BHLD.size(0) * H * tiles, 1, [&](std::int64_t begin, std::int64_t end) {
      Worker of_thread = worker();
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t head = task / tiles;
        choose({head / H, head % H}, task % tiles * kTile, of_thread);
      }
    });
  }
};

}  // namespace

at::Tensor choose_on_cpu(const BlockTopK& choice, const WholeBlocks& blocks) {
  const at::Tensor &q = choice.q_BHLD, &mean_BHND = blocks.mean_BHND;
  const std::int64_t N = mean_BHND.size(2), C = std::min(choice.others, N);
  const at::Tensor chosen_BHLC =
      at::empty({q.size(0), q.size(1), q.size(2), C}, q.options().dtype(at::kInt));
  if (C == 0) return chosen_BHLC;
  dispatch_tile_type(q.scalar_type(), [&]<typename T>(T) {
    const ScoreShape shape{.clusters = static_cast<int>(N)};
    const at::Tensor mean_BHDN =
        at::constant_pad_nd(mean_BHND.transpose(2, 3), {0, shape.padded_clusters<Sum<T>>() - N})
            .contiguous();
    ChoiceCall<T>{choice, with_contiguous_rows(q.detach()), mean_BHDN,
                  blocks.document_BN.contiguous(), chosen_BHLC}
        .run();
  });
  return chosen_BHLC;
}

}  // namespace birkhoff
