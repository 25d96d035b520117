// The choice of the blocks of keys that each query sees (MoBA), and routing's counts for metrics.
#include <algorithm>
#include <cmath>

#include "attention/kernels/block_top_k/gpu_params.h"
#include "attention/kernels/clusters/gpu_params.h"
#include "tests/bench/kernel_lab/lab.h"

namespace birkhoff::lab {
namespace {

using Element = __nv_bfloat16;

constexpr int kBatch = 4, kHeads = 16, kHeadDim = 64;
constexpr std::int64_t kAllHeads = kBatch * kHeads;

// Numbers below `count`.
Array<std::int32_t> random_numbers(std::int64_t size, int count, std::uint64_t seed) {
  const Array<std::int32_t> made(size);
  std::int32_t* to = made.get();
  for_each(size, [=] __device__(std::int64_t i) {
    to[i] = static_cast<std::int32_t>(mixed(mixed(seed) ^ static_cast<std::uint64_t>(i)) %
                                      static_cast<std::uint64_t>(count));
  });
  return made;
}

// ---- The choice of blocks.

struct ChoiceShape {
  int rows, block, chosen;

  int blocks() const { return rows / block; }
  std::int64_t all_rows() const { return kAllHeads * rows; }
  std::string text() const {
    return "L " + std::to_string(rows) + ", D 64, b " + std::to_string(block) + ", C " +
           std::to_string(chosen) + ", causal";
  }
};

struct ChoiceTensors {
  ChoiceTensors(const ChoiceShape& s, std::uint64_t seed)
      : q(s.all_rows() * kHeadDim),
        means(kAllHeads * s.blocks() * kHeadDim),
        documents(s.rows),
        block_documents(s.blocks()),
        result(s.all_rows() * s.chosen) {
    q.fill_random(seed);
    means.fill_random(seed + 1);
    documents.zero();
    block_documents.zero();
    const std::int64_t of_head = std::int64_t{s.rows} * kHeadDim;
    params = {.dtype = KernelDtype::kBFloat16,
              .batch = kBatch,
              .heads = kHeads,
              .queries = s.rows,
              .head_dim = kHeadDim,
              .block = s.block,
              .blocks = s.blocks(),
              .chosen = s.chosen,
              .causal = true,
              .q = {q.get(), {kHeads * of_head, of_head, kHeadDim}},
              .means = means.get(),
              .documents = documents.get(),
              .block_documents = block_documents.get(),
              .shared_documents = true,
              .result = result.get()};
  }

  Half q;
  Float means;
  Array<std::int32_t> documents, block_documents, result;
  BlockTopKParams params{};
};

// How far the products of the chosen blocks are from the largest products of earlier blocks, the
// largest first. Infinite if a block is missing, too late, or there twice.
Distance distance_of_choice(const ChoiceShape& s, const ChoiceTensors& t) {
  const Float exact(t.result.size()), seen(t.result.size());
  const Element* q = t.q.get();
  const float* means = t.means.get();
  const std::int32_t* result = t.result.get();
  float *to = exact.get(), *found = seen.get();
  const int rows = s.rows, block = s.block, chosen = s.chosen, blocks = s.blocks();
  for_each(s.all_rows(), [=] __device__(std::int64_t i) {
    const auto product = [&](int n) {
      double sum = 0;
      for (int d = 0; d < kHeadDim; ++d) {
        sum += static_cast<double>(to_float(q[i * kHeadDim + d])) *
               means[(i / rows * blocks + n) * kHeadDim + d];
      }
      return static_cast<float>(sum);
    };
    const int earlier = static_cast<int>(i % rows) / block;
    // Blocks in the order of their products, then of their numbers.
    float last = INFINITY;
    int last_block = -1;
    for (int c = 0; c < chosen; ++c) {
      float largest = -INFINITY;
      int of_largest = -1;
      for (int n = 0; n < earlier; ++n) {
        const float x = product(n);
        const bool is_next = x < last || (x == last && n > last_block);
        if (!is_next || x <= largest) continue;
        largest = x;
        of_largest = n;
      }
      last = largest;
      last_block = of_largest;
      const int n = result[i * chosen + c];
      bool valid = c < earlier ? n >= 0 && n < earlier : n == -1;
      for (int other = 0; other < c && n >= 0; ++other) {
        valid = valid && result[i * chosen + other] != n;
      }
      to[i * chosen + c] = c < earlier ? largest : 0;
      found[i * chosen + c] = !valid ? NAN : c < earlier ? product(n) : 0;
    }
  });
  return distance(seen, exact);
}

void choice(Lab& lab, const ChoiceShape& s) {
  if (!lab.wants("choice of blocks", s.text())) return;
  const ChoiceTensors first(s, 1);
  const std::int64_t bytes = first.q.bytes() + first.means.bytes() + first.result.bytes();
  std::vector<ChoiceTensors> copies{first};
  while (static_cast<int>(copies.size()) < lab.copies(bytes)) {
    copies.emplace_back(s, 100 + copies.size());
  }
  // A query is compared with half of the blocks.
  Case each{"choice of blocks", s.text(), static_cast<double>(bytes),
            static_cast<double>(s.all_rows()) * s.blocks() * kHeadDim, bytes};
  each.launch = [=](int i, cudaStream_t stream) {
    launch_block_choice(copies[static_cast<std::size_t>(i)].params, stream);
  };
  const auto poison = [=] {
    cuda_check(cudaMemset(first.result.get(), 0x7f, static_cast<std::size_t>(first.result.bytes())),
               "cudaMemset");
  };
  each.outputs = {{"products of the chosen", poison, [=] { return checksum(first.result); },
                   [=] { return distance_of_choice(s, first); }, [] { return Distance{}; },
                   0x1p-18f}};
  lab.run(each);
}

// ---- Counts for metrics.

void counts(Lab& lab, int rows, int clusters) {
  const std::string shape = "L " + std::to_string(rows) + ", K " + std::to_string(clusters);
  if (!lab.wants("cluster counts", shape)) return;
  constexpr int kCompared = 8;
  const std::int64_t compared = (rows + kCompared - 1) / kCompared,
                     bytes = 4 * kAllHeads * (rows + compared), copies = lab.copies(bytes);
  const Array<std::int32_t> cluster = random_numbers(copies * kAllHeads * rows, clusters, 1),
                            before = random_numbers(copies * kAllHeads * compared, clusters, 2),
                            result(kAllHeads * kNumClusterFigures);
  const Float idle = Float(std::int64_t{kHeads} * clusters).fill_random(3);
  const ClusterCountsParams params{.batch = kBatch,
                                   .heads = kHeads,
                                   .rows = rows,
                                   .compared = kCompared,
                                   .clusters = clusters,
                                   .cluster = cluster.get(),
                                   .before = before.get(),
                                   .idle_steps = idle.get(),
                                   .idle_strides = {clusters, 1},
                                   .counts = result.get()};
  const Float exact(result.size()), seen(result.size());
  const auto compare = [=] {
    float *to = exact.get(), *found = seen.get();
    const std::int32_t* counts = result.get();
    for_each(kAllHeads, [=] __device__(std::int64_t i) {
      const std::int32_t* of_rows = params.cluster + i * rows;
      float sums[kNumClusterFigures] = {};
      for (int c = 0; c < clusters; ++c) {
        int members = 0;
        for (int r = 0; r < rows; ++r) members += of_rows[r] == c;
        sums[kLargestCluster] = fmaxf(sums[kLargestCluster], members);
        sums[kRows] += members;
        if (i >= kHeads) continue;
        sums[kClusters] += 1;
        sums[kIdleClusters] += params.idle_steps[i * clusters + c] > 0;
      }
      for (std::int64_t m = 0; m < compared; ++m) {
        sums[kMovedRows] += of_rows[m * kCompared] != params.before[i * compared + m];
        sums[kComparedRows] += 1;
      }
      for (int f = 0; f < kNumClusterFigures; ++f) {
        to[i * kNumClusterFigures + f] = sums[f];
        found[i * kNumClusterFigures + f] = static_cast<float>(counts[i * kNumClusterFigures + f]);
      }
    });
    return distance(seen, exact);
  };
  Case each{"cluster counts", shape, static_cast<double>(bytes), 0, bytes};
  each.launch = [=](int i, cudaStream_t stream) {
    (void)idle;
    ClusterCountsParams copy = params;
    copy.cluster = cluster.get() + i * kAllHeads * rows;
    copy.before = before.get() + i * kAllHeads * compared;
    launch_cluster_counts(copy, stream);
  };
  each.outputs = {{"counts", [=] { result.poison(); }, [=] { return checksum(result); }, compare,
                   [] { return Distance{}; }, 0x1p-22f}};
  lab.run(each);
}

}  // namespace

void cases(Lab& lab) {
  for (const ChoiceShape& s :
       {ChoiceShape{1024, 64, 2}, ChoiceShape{4096, 64, 2}, ChoiceShape{16384, 64, 2}}) {
    choice(lab, s);
  }
  counts(lab, 1024, 4);
  counts(lab, 4096, 16);
}

}  // namespace birkhoff::lab
