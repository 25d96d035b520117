// The block-attention kernels, against fp64 and against themselves. Legend: B batch, H heads, N
// blocks, b tokens of a block, D head dim.
#include "attention/kernels/block_attention/paths.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>

#include "attention/kernels/tile_attention/cpu_loop.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

// One random problem; its tensors are leaves.
struct Problem {
  BlockAttention attention;
  std::vector<at::Tensor> leaves;
  at::Tensor d_out;
  std::string name;

  Problem to(at::ScalarType dtype) const {
    Problem other = *this;
    other.leaves.clear();
    std::vector<at::Tensor> originals;
    const auto leaf = [&](const at::Tensor& x) {  // the same one for two entries' keys
      for (std::size_t i = 0; i < originals.size(); ++i) {
        if (originals[i].is_same(x)) return other.leaves[i];
      }
      originals.push_back(x);
      other.leaves.push_back(x.detach().to(dtype).set_requires_grad(true));
      return other.leaves.back();
    };
    other.attention.q_BHNbD = leaf(attention.q_BHNbD);
    for (KeyBlocks& keys : other.attention.keys) {
      keys.k_BHNbD = leaf(keys.k_BHNbD);
      keys.v_BHNbD = leaf(keys.v_BHNbD);
      if (keys.bias_BHNbb.defined()) keys.bias_BHNbb = leaf(keys.bias_BHNbb);
      if (keys.weights_BHN.defined()) keys.weights_BHN = leaf(keys.weights_BHN);
    }
    for (at::Tensor* each : {&other.attention.relative.keys_HRD,
                             &other.attention.relative.values_HRD, &other.attention.sink_H}) {
      if (each->defined()) *each = leaf(*each);
    }
    if (at::Tensor& bias_HR = other.attention.relative.bias_HR; bias_HR.defined()) {
      bias_HR = bias_HR.detach().to(at::toOpMathType(dtype)).set_requires_grad(true);
      other.leaves.push_back(bias_HR);
    }
    other.d_out = d_out.to(dtype);
    return other;
  }
};

// Adds relative positions, sinks and grouped queries to a problem, each with some seeds.
void add_terms(int seed, std::uint64_t tensor_seed, Problem& problem) {
  std::mt19937 random(static_cast<unsigned>(seed) + 1000);
  const auto draw = [&](const std::vector<std::int64_t>& from) {
    return from[random() % from.size()];
  };
  const auto tensor = [&](at::IntArrayRef sizes) {
    return random_tensor(sizes, at::kFloat, ++tensor_seed);
  };
  BlockAttention& in = problem.attention;
  const std::int64_t B = in.q_BHNbD.size(0), N = in.q_BHNbD.size(2), b = in.q_BHNbD.size(3),
                     D = in.q_BHNbD.size(4), group = draw({1, 2, 3}),
                     H = in.q_BHNbD.size(1) * group;
  const double size = in.q_BHNbD.abs().max().item<double>() / 3;
  if (group > 1) {
    in.q_BHNbD = tensor({B, N, b, H, D}).permute({0, 3, 1, 2, 4}) * size;
    problem.d_out = tensor({B, H, N, b, D});
  }
  if (random() % 4 > 0) {
    const std::int64_t heads = draw({1, H}), rows = draw({1, 3, 17, 90});
    in.relative = {.keys_HRD = tensor({heads, rows, D}),
                   .values_HRD = random() % 2 ? tensor({heads, rows, D}) : at::Tensor(),
                   .least = draw({-100, -16, -2, 0, 5})};
    for (KeyBlocks& keys : in.keys) keys.in_place = random() % 3 > 0;
  }
  // Of the size of the largest logits: a sink far below them has the gradient of a single query.
  if (random() % 2) in.sink_H = tensor({H}).abs() * (size * size);
  if (in.relative.defined() && random() % 2) {
    in.relative.bias_HR = tensor(in.relative.keys_HRD.sizes().slice(0, 2)) * size;
  }
  problem.name += " with terms";
}

// Adds an entry whose blocks are chosen, by several destinations or by none, some with weight 0.
// Its keys are often those of another entry.
void add_chosen(int seed, std::uint64_t tensor_seed, Problem& problem) {
  std::mt19937 random(static_cast<unsigned>(seed) + 2000);
  std::vector<KeyBlocks>& entries = problem.attention.keys;
  KeyBlocks keys;
  keys.k_BHNbD = entries[0].k_BHNbD;
  keys.v_BHNbD = entries[0].v_BHNbD;
  if (random() % 4 == 0) {
    keys.k_BHNbD = keys.k_BHNbD.clone();
    keys.v_BHNbD = keys.v_BHNbD.flip(2);
  }
  const std::int64_t N = keys.k_BHNbD.size(2), b = keys.k_BHNbD.size(3);
  const auto tensor = [&](at::IntArrayRef sizes) {
    return random_tensor(sizes, at::kFloat, ++tensor_seed);
  };
  const at::Tensor draws_BHN = tensor(keys.k_BHNbD.sizes().slice(0, 3));
  keys.chosen_BHN = draws_BHN.abs().mul(static_cast<double>(N) / 2).to(at::kLong).clamp_max(N - 1);
  keys.weights_BHN = tensor(draws_BHN.sizes()).masked_fill(draws_BHN > 1, 0);
  keys.mask_BHNbb = {random() % 2 ? tensor({1, 1, N, b, b}) > -0.5 : at::Tensor()};
  if (random() % 2) keys.bias_BHNbb = tensor({1, 1, N, 1, b});
  entries.insert(random() % 4 ? entries.begin() : entries.end(), keys);
  problem.name += " with chosen blocks";
}

// `seed` determines everything except the numbers, which also depend on `draw_index`. Those that
// divide by three have more terms, and a fifth of them chooses blocks.
Problem random_problem(int seed, int draw_index = 0) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto draw = [&](const std::vector<std::int64_t>& from) {
    return from[random() % from.size()];
  };
  const std::int64_t B = draw({1, 2}), H = draw({1, 3}), N = draw({1, 2, 5});
  const std::int64_t b = draw({1, 3, 8, 16, 37, 64, 65, 100, 192});
  const std::int64_t D = draw({3, 8, 20, 32, 64, 96});
  // At most 8: logits of several hundred, far beyond the range of exp.
  const double size = static_cast<double>(draw({1, 1, 5, 8}));
  std::uint64_t tensor_seed =
      100'000 * static_cast<std::uint64_t>(draw_index) + 100 * static_cast<std::uint64_t>(seed);
  // In the layout of the layers, or contiguous.
  const auto tensor = [&](double factor) {
    const at::Tensor x =
        random() % 2
            ? random_tensor({B, N, b, H, D}, at::kFloat, ++tensor_seed).permute({0, 3, 1, 2, 4})
            : random_tensor({B, H, N, b, D}, at::kFloat, ++tensor_seed);
    return x * factor;
  };
  Problem problem;
  problem.attention.q_BHNbD = tensor(size);
  const std::int64_t num_sources = draw({1, 2});
  for (std::int64_t s = 0; s < num_sources; ++s) {
    KeyBlocks keys;
    keys.k_BHNbD = tensor(size);
    keys.v_BHNbD = tensor(1);
    keys.window.first_offset = draw({0, 0, -1, -2});
    keys.window.last_offset = draw({0, 0, 1, keys.window.first_offset});
    keys.window.causal = random() % 2;
    for (std::int64_t offset = keys.window.first_offset; offset <= keys.window.last_offset;
         ++offset) {
      const auto mask = [&](at::IntArrayRef shape) {
        return random_tensor(shape, at::kFloat, ++tensor_seed) > -0.5;
      };
      switch (random() % 4) {
        case 0:
          keys.mask_BHNbb.push_back(mask({B, 1, N, b, b}));
          break;
        case 1:
          keys.mask_BHNbb.push_back(mask({1, H, N, b, 1}));  // many rows without a visible key
          break;
        default:
          keys.mask_BHNbb.emplace_back();
      }
    }
    if (random() % 2) {
      const std::vector<std::vector<std::int64_t>> shapes{
          {B, H, N, 1, b}, {1, H, 1, b, b}, {B, 1, N, b, 1}, {b}, {1, 1, 1, 1, 1}};
      keys.bias_BHNbb =
          random_tensor(shapes[random() % shapes.size()], at::kFloat, ++tensor_seed) * size;
    }
    problem.attention.keys.push_back(keys);
  }
  if (random() % 2) {
    problem.attention.dropout = random() % 2 ? 0.1f : 0.5f;
    problem.attention.noise = NoiseKey{.seed = tensor_seed,
                                       .step = at::full({1}, 3, at::kLong),
                                       .layer = 2,
                                       .sample_ids_B = at::arange(B, at::kLong) * 5'000'000'000};
  }
  problem.attention.one_softmax = random() % 2;
  problem.d_out = tensor(1);
  problem.name = "seed " + std::to_string(seed) + " N " + std::to_string(N) + " b " +
                 std::to_string(b) + " D " + std::to_string(D);
  if (seed % 5 == 1) add_chosen(seed, tensor_seed + 50, problem);
  if (seed % 3 == 0) add_terms(seed, tensor_seed, problem);
  return problem.to(at::kFloat);
}

// Returns out, then the gradient of each leaf.
std::vector<at::Tensor> solve(const Problem& problem, Path path) {
  const at::Tensor out = attend_in_blocks(problem.attention, path);
  std::vector<at::Tensor> result =
      torch::autograd::grad({out}, problem.leaves, {problem.d_out}, false, false, true);
  for (std::size_t i = 0; i < result.size(); ++i) {
    if (!result[i].defined()) result[i] = at::zeros_like(problem.leaves[i]);
  }
  result.insert(result.begin(), out.detach());
  return result;
}

constexpr int kBlockProblems = 120;

// The reference takes entries of equal width if each has its own softmax.
bool reference_can(const BlockAttention& in) {
  const auto width = [](const KeyBlocks& keys) {
    return keys.window.last_offset - keys.window.first_offset;
  };
  return in.one_softmax || std::all_of(in.keys.begin(), in.keys.end(), [&](const KeyBlocks& keys) {
           return width(keys) == width(in.keys.front());
         });
}

class FusedBlockAttentionIn : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  static double eps() {
    return GetParam() == at::kBFloat16 ? 0x1p-7 : std::numeric_limits<float>::epsilon();
  }
};
INSTANTIATE_TEST_SUITE_P(Dtypes, FusedBlockAttentionIn,
                         ::testing::Values(at::kFloat, at::kBFloat16));

// The gradient of a bias that all keys of a query share is 0: the differences of products d_out . v
// cancel. So is that of a table with one row. Returns two fp32 roundings of such a product for a
// bias of pairs or distances, and for a table of keys times a query; 0 for other leaves.
double bias_rounding(const Problem& problem, const at::Tensor& leaf) {
  const BlockAttention& in = problem.attention;
  const auto longest = [](const at::Tensor& x) {
    return x.detach().to(at::kDouble).square().sum(-1).max().sqrt().item<double>();
  };
  double largest = 0;
  for (const KeyBlocks& keys : in.keys) {
    const bool is_table = in.relative.defined() && in.relative.keys_HRD.is_same(leaf);
    const bool is_bias = in.relative.bias_HR.defined() && in.relative.bias_HR.is_same(leaf);
    if (!is_table && !is_bias && !(keys.bias_BHNbb.defined() && keys.bias_BHNbb.is_same(leaf)))
      continue;
    const double factor =
        is_table ? longest(in.q_BHNbD) / std::sqrt(static_cast<double>(in.q_BHNbD.size(4))) : 1;
    largest = std::max(largest, factor * 2 * std::numeric_limits<float>::epsilon() *
                                    longest(problem.d_out) * longest(keys.v_BHNbD));
  }
  return largest;
}

// The largest errors over four thousand queries of one shape. In a small problem with large logits
// the error is that of rounding one logit, so which path has the smaller error is random.
TEST_P(FusedBlockAttentionIn, ErrorsAreThoseOfTheReference) {
  constexpr std::int64_t kQueries = 4000;
  // Probabilities below the smallest normal fp32 number are 0; they are multiplied by k, v and
  // d_out.
  constexpr double kUnderflow = 1e-32;
  int checked = 0;
  for (int seed = 0; seed < kBlockProblems; seed += 2) {
    const BlockAttention shape = random_problem(seed).attention;
    if (!reference_can(shape)) continue;
    const std::int64_t queries = shape.q_BHNbD.numel() / shape.q_BHNbD.size(4);
    std::vector<double> error, reference_error, scale, rounding;
    for (int draw = 0; draw * queries < kQueries; ++draw) {
      const Problem problem = random_problem(seed, draw).to(GetParam());
      ASSERT_EQ(choose_path(problem.attention, Path::kFused), Path::kFused);
      const auto exact = solve(problem.to(at::kDouble), Path::kReference);
      const auto reference = solve(problem, Path::kReference);
      const auto fused = solve(problem, Path::kFused);
      for (auto* largest : {&error, &reference_error, &scale, &rounding}) {
        largest->resize(exact.size());
      }
      for (std::size_t i = 0; i < exact.size(); ++i) {
        EXPECT_EQ(fused[i].scalar_type(), reference[i].scalar_type());
        error[i] = std::max(error[i], max_difference(fused[i], exact[i]));
        reference_error[i] = std::max(reference_error[i], max_difference(reference[i], exact[i]));
        scale[i] = std::max(scale[i], exact[i].abs().max().item<double>());
        if (i > 0) {
          rounding[i] = std::max(rounding[i], bias_rounding(problem, problem.leaves[i - 1]));
        }
        EXPECT_TRUE(fused[i].isfinite().all().item<bool>()) << problem.name << " tensor " << i;
      }
    }
    for (std::size_t i = 0; i < error.size(); ++i) {
      EXPECT_LE(error[i], 2 * reference_error[i] + 2 * eps() * scale[i] + rounding[i] + kUnderflow)
          << random_problem(seed).name << " tensor " << i;
      ++checked;
    }
  }
  EXPECT_GT(checked, 150);
}

TEST(FusedBlockAttention, Fp64EqualsTheReference) {
  for (int seed = 0; seed < kBlockProblems; ++seed) {
    const Problem problem = random_problem(seed).to(at::kDouble);
    if (!reference_can(problem.attention)) continue;
    const auto reference = solve(problem, Path::kReference);
    const auto fused = solve(problem, Path::kFused);
    for (std::size_t i = 0; i < reference.size(); ++i) {
      const double scale = std::max(1.0, reference[i].abs().max().item<double>());
      EXPECT_LE(max_difference(fused[i], reference[i]), 1e-11 * scale)
          << problem.name << " tensor " << i;
    }
  }
}

TEST_P(FusedBlockAttentionIn, SameBitsForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (int seed = 0; seed < kBlockProblems; seed += 2) {
    const Problem problem = random_problem(seed).to(GetParam());
    at::set_num_threads(1);
    const auto one = solve(problem, Path::kFused);
    for (const int more : {1, 2, 3}) {
      at::set_num_threads(more);
      const auto other = solve(problem, Path::kFused);
      for (std::size_t i = 0; i < one.size(); ++i) {
        EXPECT_TRUE(at::equal(one[i], other[i])) << problem.name << " threads " << more;
      }
    }
  }
  at::set_num_threads(threads);
}

TEST(FusedBlockAttention, QueriesWithoutAVisibleKeyGiveZero) {
  Problem problem = random_problem(1);
  const at::Tensor q = problem.attention.q_BHNbD;
  at::Tensor mask = at::ones({1, 1, 1, q.size(3), q.size(3)}, at::kBool);
  mask.select(3, 0).fill_(false);
  for (KeyBlocks& keys : problem.attention.keys) {
    for (at::Tensor& each : keys.mask_BHNbb) each = mask;
  }
  const auto result = solve(problem, Path::kFused);
  EXPECT_EQ(result[0].select(3, 0).abs().max().item<float>(), 0);
  EXPECT_EQ(result[1].select(3, 0).abs().max().item<float>(), 0);
  for (const at::Tensor& x : result) EXPECT_TRUE(x.isfinite().all().item<bool>());
}

class TileKernelsOf : public ::testing::TestWithParam<InstructionSet> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam())) GTEST_SKIP() << "this machine lacks the instructions";
  }
};
INSTANTIATE_TEST_SUITE_P(All, TileKernelsOf,
                         ::testing::Values(InstructionSet::kPortable, InstructionSet::kAvx2,
                                           InstructionSet::kAvx512, InstructionSet::kAvx512Bf16,
                                           InstructionSet::kAmxBf16));

// One query tile over three key tiles, the second masked and weighted, the last causal, against
// autograd in fp64.
template <typename T>
double worst_tile_error(const TileKernels<T>& kernels, at::ScalarType dtype) {
  constexpr std::int64_t kQueries = 37, D = 20;
  const at::ScalarType sum_dtype = at::toOpMathType(dtype);
  const auto leaf = [&](std::int64_t rows, std::uint64_t seed) {
    return random_tensor({rows, D}, dtype, seed).set_requires_grad(true);
  };
  const at::Tensor q = leaf(kQueries, 1), d_out = random_tensor({kQueries, D}, dtype, 2);
  const at::Tensor mask = random_tensor({kQueries, 64}, at::kFloat, 3) > 0;
  std::vector<at::Tensor> leaves{q}, visible{at::ones({kQueries, 5}, at::kBool), mask,
                                             at::ones({kQueries, kQueries}, at::kBool).tril()};
  std::vector<at::Tensor> k, v, results{at::empty_like(q)}, sums{q};
  std::vector<KeyTile<T>> tiles;
  const auto rows = [](const at::Tensor& x) {
    return Rows<T>{static_cast<T*>(x.mutable_data_ptr()), D};
  };
  const auto const_rows = [](const at::Tensor& x) {
    return Rows<const T>{static_cast<const T*>(x.const_data_ptr()), D};
  };
  for (const std::int64_t num_keys : {std::int64_t{5}, std::int64_t{64}, kQueries}) {
    k.push_back(leaf(num_keys, 10 + tiles.size()));
    v.push_back(leaf(num_keys, 20 + tiles.size()));
    KeyTile<T>& tile = tiles.emplace_back();
    tile.num_keys = static_cast<int>(num_keys);
    tile.k = const_rows(k.back());
    tile.v = const_rows(v.back());
    for (const auto& [key, written] :
         {std::pair{k.back(), &tile.d_k}, std::pair{v.back(), &tile.d_v}}) {
      leaves.push_back(key);
      results.push_back(at::empty_like(key));
      sums.push_back(at::ones(key.sizes(), sum_dtype));
      *written = rows(results.back());
    }
  }
  tiles[1].mask = mask.const_data_ptr<bool>();
  tiles[1].mask_query_stride = 64;
  tiles[1].mask_key_stride = 1;
  tiles[2].causal = true;
  const at::Tensor weight = at::full({}, 0.75, at::kDouble).set_requires_grad(true);
  double d_weight = 0;
  tiles[1].weight = weight.item<Sum<T>>();
  tiles[1].d_weight = &d_weight;
  for (std::vector<at::Tensor>* x : {&k, &v}) (*x)[1] = (*x)[1].to(at::kDouble) * weight;

  const at::Tensor out = at::empty_like(q), statistics = at::empty({2, kQueries}, sum_dtype);
  QueryTile<T> queries;
  queries.num_queries = kQueries;
  queries.q = const_rows(q);
  queries.out = rows(out);
  queries.max = statistics.data_ptr<Sum<T>>();
  queries.inverse_sum = queries.max + kQueries;
  queries.d_out = const_rows(d_out);
  queries.d_q = rows(results[0]);
  const TileShape shape{D, 0.3};
  const auto new_scratch = [&](int num_key_tiles) {
    const std::size_t bytes = kernels.scratch_bytes(shape, num_key_tiles);
    return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  };
  void* scratch = new_scratch(1);
  kernels.forward(shape, queries, tiles.data(), 3, scratch);
  std::free(scratch);
  scratch = new_scratch(3);
  kernels.backward(shape, queries, tiles.data(), 3, OnNaN::kStop, scratch);
  for (std::size_t i = 0; i < tiles.size(); ++i) {  // again, adding to 1
    tiles[i].d_k_sum = {sums[2 * i + 1].data_ptr<Sum<T>>(), D};
    tiles[i].d_v_sum = {sums[2 * i + 2].data_ptr<Sum<T>>(), D};
  }
  kernels.backward(shape, queries, tiles.data(), 3, OnNaN::kStop, scratch);
  std::free(scratch);

  const at::Tensor hidden = at::cat(visible, 1).logical_not();
  const at::Tensor exact_out = at::matmul(
      at::softmax((0.3 * at::matmul(q.to(at::kDouble), at::cat(k, 0).to(at::kDouble).t()))
                      .masked_fill(hidden, -std::numeric_limits<double>::infinity()),
                  -1),
      at::cat(v, 0).to(at::kDouble));
  std::vector<at::Tensor> inputs = leaves;
  inputs.push_back(weight);
  const auto exact = torch::autograd::grad({exact_out}, inputs, {d_out.to(at::kDouble)});
  double worst = max_difference(out, exact_out);
  // Both passes added to it.
  worst = std::max(worst, std::abs(d_weight / 2 - exact.back().item<double>()));
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    worst = std::max(worst, max_difference(results[i], exact[i]));
    if (i > 0) worst = std::max(worst, max_difference(sums[i], exact[i] + 1));
  }
  return worst;
}

TEST_P(TileKernelsOf, EqualsAutograd) {
  EXPECT_LE(worst_tile_error(tile_kernels<float>(GetParam()), at::kFloat), 1e-5);
  EXPECT_LE(worst_tile_error(tile_kernels<double>(GetParam()), at::kDouble), 1e-13);
  EXPECT_LE(worst_tile_error(tile_kernels<Bf16>(GetParam()), at::kBFloat16), 2e-2);
}

// Every float between the least and 80, by a step coprime to powers of two.
TEST_P(TileKernelsOf, ExpIsWithinTwoEps) {
  const auto bits_of = [](float x) { return std::bit_cast<std::uint32_t>(x); };
  std::vector<float> x;
  for (std::uint32_t bits = 0; bits < bits_of(80.0f); bits += 101) {
    x.push_back(std::bit_cast<float>(bits));
  }
  for (std::uint32_t bits = 0; bits < bits_of(87.3f); bits += 101) {
    x.push_back(-std::bit_cast<float>(bits));
  }
  std::vector<float> y(x.size());
  tile_kernels<float>(GetParam()).exp(x.data(), y.data(), x.size());
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, std::abs(y[i] / std::exp(static_cast<double>(x[i])) - 1));
  }
  EXPECT_LE(worst, 2 * std::numeric_limits<float>::epsilon());
}

TEST_P(TileKernelsOf, ExpOfDoublesIsWithinTwoEps) {
  std::vector<double> x;
  for (double each = -708.2; each < 80; each += 0.000317) x.push_back(each);
  std::vector<double> y(x.size());
  tile_kernels<double>(GetParam()).exp(x.data(), y.data(), x.size());
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    worst = std::max(
        worst, static_cast<double>(std::abs(y[i] / std::exp(static_cast<long double>(x[i])) - 1)));
  }
  EXPECT_LE(worst, 2 * std::numeric_limits<double>::epsilon());
}

TEST_P(TileKernelsOf, ExpAtTheEnds) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> x{-kInfinity, -1e30f, -90, 0, std::numeric_limits<float>::quiet_NaN()};
  std::vector<float> y(x.size());
  tile_kernels<float>(GetParam()).exp(x.data(), y.data(), x.size());
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(y[2], 0);
  EXPECT_EQ(y[3], 1);
  EXPECT_TRUE(std::isnan(y[4]));
}

}  // namespace
}  // namespace birkhoff::test
