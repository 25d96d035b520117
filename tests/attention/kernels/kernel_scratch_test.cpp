// Kernels do not read scratch memory that they have not written: whatever it holds, results have
// the same bits. Tests each instruction set that this machine has, and the AVX-512 sources,
// emulated.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention/kernels/block_mix/cpu_mix.h"
#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/sinkhorn/cpu_prefix.h"
#include "attention/kernels/tile_attention/cpu_loop.h"
#include "tests/attention/kernels/tile_attention/avx512_emulated.h"

namespace birkhoff::test {
namespace {

constexpr int kFills[] = {0x00, 0xff};  // bytes of scratch memory; the second is NaN in every type

class Random {
 public:
  explicit Random(unsigned seed) : random_(seed) {}
  int below(int end) { return static_cast<int>(random_() % static_cast<unsigned>(end)); }
  template <typename T>
  std::vector<T> numbers(int count) {
    std::normal_distribution<float> normal;
    std::vector<T> x;
    for (int i = 0; i < count; ++i) {
      const float number = normal(random_);
      if constexpr (std::is_same_v<T, Bf16>) {
        std::uint32_t bits;
        std::memcpy(&bits, &number, sizeof(bits));
        x.push_back(Bf16{static_cast<std::uint16_t>(bits >> 16)});
      } else {
        x.push_back(number);
      }
    }
    return x;
  }

 private:
  std::mt19937 random_;
};

template <typename T>
void append(const std::vector<T>& x, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(T));
}

ScratchMemory filled_scratch(std::size_t bytes, int fill) {
  ScratchMemory memory = scratch_memory(bytes);
  std::memset(memory.get(), fill, bytes);
  return memory;
}

// One query tile and its key tiles, drawn by `seed`.
template <typename T>
struct TileProblem {
  struct Keys {
    std::vector<T> k, v, bias;
    std::vector<char> mask;
    KeyTile<T> tile;
  };
  TileShape shape;
  TileDropout dropout;
  int num_queries;
  std::vector<T> q, d_out;
  std::vector<Keys> keys;

  explicit TileProblem(unsigned seed) {
    Random random(seed);
    const auto draw = [&](std::initializer_list<int> from) {
      return from.begin()[random.below(static_cast<int>(from.size()))];
    };
    num_queries = draw({1, 2, 3, 5, 8, 9, 16, 17, 31, 64});
    shape.head_dim = draw({1, 3, 8, 17, 20, 48, 64});
    shape.scale = 0.3;
    dropout = {.key = 5, .least = 1u << 22, .scale = 4. / 3, .query_stride = 67};
    if (random.below(2)) shape.dropout = &dropout;
    q = random.numbers<T>(num_queries * shape.head_dim);
    d_out = random.numbers<T>(num_queries * shape.head_dim);
    const int num_tiles = draw({1, 2, 3});
    keys.resize(static_cast<std::size_t>(num_tiles));
    for (Keys& each : keys) {
      KeyTile<T>& tile = each.tile;
      tile.causal = random.below(2);
      tile.num_keys = tile.causal ? num_queries : draw({1, 3, 4, 8, 11, 16, 33, 64});
      each.k = random.numbers<T>(tile.num_keys * shape.head_dim);
      each.v = random.numbers<T>(tile.num_keys * shape.head_dim);
      tile.k = {each.k.data(), shape.head_dim};
      tile.v = {each.v.data(), shape.head_dim};
      if (random.below(2)) {
        for (int i = 0; i < num_queries * tile.num_keys; ++i) each.mask.push_back(random.below(3));
        tile.mask = reinterpret_cast<const bool*>(each.mask.data());
        for (char& mask : each.mask) mask = mask != 0;
        tile.mask_query_stride = tile.num_keys;
        tile.mask_key_stride = 1;
      }
      if (random.below(2)) {
        each.bias = random.numbers<T>(tile.num_keys);
        tile.bias = each.bias.data();
        tile.bias_key_stride = 1;
        tile.d_bias_key_stride = 1;
      }
    }
  }

  // Returns all results of both passes, as bytes.
  std::string solve(const TileKernels<T>& kernels, int fill) const {
    const int count = num_queries * shape.head_dim, num_tiles = static_cast<int>(keys.size());
    std::vector<T> out(static_cast<std::size_t>(count)), d_q(out);
    std::vector<Sum<T>> max(static_cast<std::size_t>(num_queries)), inverse_sum(max);
    QueryTile<T> queries;
    queries.num_queries = num_queries;
    queries.q = {q.data(), shape.head_dim};
    queries.out = {out.data(), shape.head_dim};
    queries.max = max.data();
    queries.inverse_sum = inverse_sum.data();
    queries.d_out = {d_out.data(), shape.head_dim};
    queries.d_q = {d_q.data(), shape.head_dim};
    std::vector<KeyTile<T>> tiles;
    std::vector<std::vector<T>> gradients;
    std::vector<std::vector<double>> d_biases;
    for (const Keys& each : keys) {
      KeyTile<T>& tile = tiles.emplace_back(each.tile);
      for (auto* d : {&tile.d_k, &tile.d_v}) {
        *d = {gradients.emplace_back(each.k.size()).data(), shape.head_dim};
      }
      d_biases.emplace_back(each.bias.size());
      if (tile.bias) tile.d_bias = d_biases.back().data();
    }
    const auto scratch = [&](int tiles_kept) {
      return filled_scratch(kernels.scratch_bytes(shape, tiles_kept), fill);
    };
    EXPECT_TRUE(kernels.forward(shape, queries, tiles.data(), num_tiles, scratch(1).get()));
    EXPECT_TRUE(kernels.backward(shape, queries, tiles.data(), num_tiles, OnNaN::kStop,
                                 scratch(num_tiles).get()));
    std::string bytes;
    append(out, bytes);
    append(max, bytes);
    append(inverse_sum, bytes);
    append(d_q, bytes);
    for (const auto& x : gradients) append(x, bytes);
    for (const auto& x : d_biases) append(x, bytes);
    return bytes;
  }
};

template <typename T>
void check_tiles() {
  for (unsigned seed = 0; seed < 32; ++seed) {
    const TileProblem<T> problem(seed);
    const auto check = [&](const TileKernels<T>& kernels, const std::string& name) {
      EXPECT_EQ(problem.solve(kernels, kFills[0]), problem.solve(kernels, kFills[1]))
          << name << " seed " << seed;
    };
    for_each_set([](InstructionSet set) -> const TileKernels<T>& { return tile_kernels<T>(set); },
                 emulated_tile_kernels(T{}), check);
    if constexpr (std::is_same_v<T, Bf16>) check(emulated_amx_tile_kernels(), "emulated AMX");
  }
}

TEST(KernelScratch, TileKernelsReadWhatTheyWrote) {
  check_tiles<float>();
  check_tiles<double>();
  check_tiles<Bf16>();
}

template <typename T>
std::string mix_bytes(const MixKernels<T>& kernels, unsigned seed, int fill) {
  Random random(seed);
  MixShape shape;
  shape.num_blocks = 1 + random.below(20);
  shape.block = 1 + random.below(3);
  shape.head_dim = 1 + random.below(34);
  shape.diagonal = random.below(2) ? -1 : shape.num_blocks - 1;
  const int N = shape.num_blocks, D = shape.head_dim, size = N * shape.block * D;
  const std::vector<T> w = random.numbers<T>(N * N), x = random.numbers<T>(size),
                       d_y = random.numbers<T>(size), other = random.numbers<T>(size);
  std::vector<T> y(x.size()), d_x(x.size()), d_w(w.size());
  const MixWeights<T> weights{w.data(), N, 1};
  const auto blocks = [&](auto* data) {
    return HeadBlocks<std::remove_pointer_t<decltype(data)>>{data, shape.block * D, D};
  };
  const HeadBlocks<const T> x_in = blocks(x.data()), d_y_in = blocks(d_y.data());
  const HeadBlocks<const T> other_in =
      random.below(2) ? blocks(other.data()) : HeadBlocks<const T>{};
  const HeadBlocks<T> y_out = blocks(y.data()), d_x_out = blocks(d_x.data());
  const auto scratch = [&] { return filled_scratch(kernels.scratch_bytes(shape), fill); };
  kernels.forward(shape, weights, &x_in, &y_out, 1, scratch().get());
  kernels.backward(shape, weights, &x_in, &d_y_in, &other_in, &d_x_out, 1, d_w.data(),
                   scratch().get());
  std::string bytes;
  for (const auto* result : {&y, &d_x, &d_w}) append(*result, bytes);
  return bytes;
}

template <typename T>
void check_mixes() {
  for (unsigned seed = 0; seed < 20; ++seed) {
    for_each_set(
        [](InstructionSet set) -> const MixKernels<T>& { return mix_kernels<T>(set); },
        emulated_mix_kernels(T{}),
        [&](const MixKernels<T>& kernels, const std::string& name) {
          EXPECT_EQ(mix_bytes(kernels, seed, kFills[0]), mix_bytes(kernels, seed, kFills[1]))
              << name << " seed " << seed;
        });
  }
}

TEST(KernelScratch, MixKernelsReadWhatTheyWrote) {
  check_mixes<float>();
  check_mixes<double>();
  check_mixes<Bf16>();
}

template <typename T>
std::string score_bytes(const ScoreKernels<T>& kernels, unsigned seed, int fill) {
  using S = Sum<T>;
  Random random(seed);
  const ScoreShape shape{1 + random.below(70), 1 + random.below(40), 1.5};
  const int D = shape.head_dim, padded = shape.padded_clusters<S>(), rows = 1 + random.below(kTile);
  const std::vector<T> x = random.numbers<T>(rows * D), d_unit = random.numbers<T>(D);
  std::vector<S> centroids = random.numbers<S>(D * padded);
  for (int i = 0; i < D * padded; ++i) {
    if (i % padded >= shape.clusters) centroids[static_cast<std::size_t>(i)] = 0;
  }
  std::vector<T> unit(x.size()), d_x(d_unit.size());
  std::vector<S> inverse(static_cast<std::size_t>(rows)), best_score(inverse),
      scores(static_cast<std::size_t>(kTile * padded));
  std::vector<std::int32_t> best(inverse.size());
  const ScratchMemory scratch = filled_scratch(kernels.scratch_bytes(D), fill);
  kernels.score(shape, centroids.data(),
                {.num_rows = rows,
                 .x = {x.data(), D},
                 .unit = {unit.data(), D},
                 .inverse = inverse.data(),
                 .scores = scores.data(),
                 .best = best.data(),
                 .best_score = best_score.data()},
                scratch.get());
  scores.resize(static_cast<std::size_t>(rows) *
                static_cast<std::size_t>(padded));  // others are not results
  const ScratchMemory other_scratch = filled_scratch(kernels.scratch_bytes(D), fill);
  kernels.row_gradient(shape,
                       {.unit = unit.data(),
                        .d_unit = d_unit.data(),
                        .inverse = inverse[0],
                        .d_distance = S{0.5},
                        .centroid = centroids.data(),
                        .d_x = d_x.data()},
                       other_scratch.get());
  std::string bytes;
  for (const auto* result : {&unit, &d_x}) append(*result, bytes);
  for (const auto* result : {&inverse, &best_score, &scores}) append(*result, bytes);
  append(best, bytes);
  return bytes;
}

template <typename T>
void check_scores() {
  for (unsigned seed = 0; seed < 50; ++seed) {
    for_each_set(
        [](InstructionSet set) -> const ScoreKernels<T>& { return score_kernels<T>(set); },
        emulated_score_kernels(T{}),
        [&](const ScoreKernels<T>& kernels, const std::string& name) {
          EXPECT_EQ(score_bytes(kernels, seed, kFills[0]), score_bytes(kernels, seed, kFills[1]))
              << name << " seed " << seed;
        });
  }
}

TEST(KernelScratch, ScoresReadWhatTheyWrote) {
  check_scores<float>();
  check_scores<double>();
  check_scores<Bf16>();
}

std::string prefix_bytes(const PrefixBalanceKernels& kernels, unsigned seed, int fill) {
  Random random(seed);
  const int N = 1 + random.below(21), first = random.below(N);
  std::vector<double> scores = random.numbers<double>(N * N);
  for (double& score : scores) score = random.below(5) ? score : -HUGE_VAL;
  if (random.below(4) == 0) scores[scores.size() / 2] = 1e3;  // leaves the number range
  const std::vector<double> d_p = random.numbers<double>((N - first) * N);
  std::vector<double> p(d_p.size()), d_scores(scores.size());
  std::vector<char> solved(static_cast<std::size_t>(N - first));
  const int iterations = 1 + random.below(3);
  PrefixBalance balance{.size = N,
                        .iterations = iterations,
                        .first_row = first,
                        .scores = scores.data(),
                        .p = p.data(),
                        .solved = reinterpret_cast<bool*>(solved.data()),
                        .d_p = nullptr,
                        .d_scores = nullptr};
  const auto scratch = [&](bool backward) {
    return filled_scratch(kernels.scratch_bytes(N, iterations, backward), fill);
  };
  kernels.forward(balance, scratch(false).get());
  balance.d_p = d_p.data();
  balance.d_scores = d_scores.data();
  kernels.backward(balance, scratch(true).get());
  std::string bytes;
  for (const auto* result : {&p, &d_scores}) append(*result, bytes);
  append(solved, bytes);
  return bytes;
}

TEST(KernelScratch, PrefixBalancesReadWhatTheyWrote) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    for_each_set(
        &prefix_balance_kernels, emulated_prefix_balance_kernels(),
        [&](const PrefixBalanceKernels& kernels, const std::string& name) {
          EXPECT_EQ(prefix_bytes(kernels, seed, kFills[0]), prefix_bytes(kernels, seed, kFills[1]))
              << name << " seed " << seed;
        });
  }
}

}  // namespace
}  // namespace birkhoff::test
