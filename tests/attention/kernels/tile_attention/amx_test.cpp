// The tile kernels with AMX, emulated and, where the CPU has it, its own: as exact as LibTorch's
// operations in bf16.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <string>
#include <vector>

#include "attention/kernels/common/cpu_scratch.h"
#include "tests/attention/kernels/tile_attention/avx512_emulated.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

constexpr double kScale = 0.3;

// A tile of queries that sees a tile of other keys and, in causal order, keys of its own.
struct TwoTiles {
  at::Tensor q, d_out, k[2], v[2];
  std::int64_t D;

  TwoTiles(std::int64_t num_queries, std::int64_t num_keys, std::int64_t head_dim) : D(head_dim) {
    std::uint64_t seed = 0;
    const auto rows = [&](std::int64_t count) {
      return random_tensor({count, D}, at::kBFloat16, ++seed);
    };
    q = rows(num_queries);
    d_out = rows(num_queries);
    for (at::Tensor* x : {k, v}) {
      x[0] = rows(num_keys);
      x[1] = rows(num_queries);
    }
  }

  // Output and gradients of q, k and v; then the largest logit of each query, in whose bits a
  // product shows.
  std::vector<at::Tensor> by_kernels(const TileKernels<Bf16>& kernels) const {
    const auto tensor_rows = [this](const at::Tensor& x) {
      return Rows<Bf16>{static_cast<Bf16*>(x.mutable_data_ptr()), D};
    };
    const auto const_rows = [this](const at::Tensor& x) {
      return Rows<const Bf16>{static_cast<const Bf16*>(x.const_data_ptr()), D};
    };
    std::vector<at::Tensor> results{at::empty_like(q), at::empty_like(q)};
    KeyTile<Bf16> tiles[2];
    for (int i = 0; i < 2; ++i) {
      tiles[i].num_keys = static_cast<int>(k[i].size(0));
      tiles[i].k = const_rows(k[i]);
      tiles[i].v = const_rows(v[i]);
      tiles[i].causal = i == 1;
      tiles[i].d_k = tensor_rows(results.emplace_back(at::empty_like(k[i])));
      tiles[i].d_v = tensor_rows(results.emplace_back(at::empty_like(v[i])));
    }
    const at::Tensor statistics = at::empty({2, q.size(0)});
    QueryTile<Bf16> queries;
    queries.num_queries = static_cast<int>(q.size(0));
    queries.q = const_rows(q);
    queries.out = tensor_rows(results[0]);
    queries.max = statistics.data_ptr<float>();
    queries.inverse_sum = queries.max + q.size(0);
    queries.d_out = const_rows(d_out);
    queries.d_q = tensor_rows(results[1]);
    const TileShape shape{static_cast<int>(D), kScale};
    EXPECT_TRUE(kernels.forward(shape, queries, tiles, 2,
                                scratch_memory(kernels.scratch_bytes(shape, 1)).get()));
    EXPECT_TRUE(kernels.backward(shape, queries, tiles, 2, OnNaN::kStop,
                                 scratch_memory(kernels.scratch_bytes(shape, 2)).get()));
    results.push_back(statistics[0]);
    return results;
  }

  std::vector<at::Tensor> by_autograd(at::ScalarType dtype) const {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& x : {q, k[0], v[0], k[1], v[1]}) {
      leaves.push_back(x.to(dtype).clone().set_requires_grad(true));
    }
    const at::Tensor hidden = at::cat({at::zeros({q.size(0), k[0].size(0)}, at::kBool),
                                       at::ones({q.size(0), q.size(0)}, at::kBool).triu(1)},
                                      1);
    const at::Tensor scores =
        at::matmul(leaves[0], at::cat({leaves[1], leaves[3]}, 0).t()) * kScale;
    const at::Tensor p =
        at::softmax(scores.masked_fill(hidden, -std::numeric_limits<double>::infinity()), -1);
    const at::Tensor out = at::matmul(p, at::cat({leaves[2], leaves[4]}, 0));
    std::vector<at::Tensor> results{out.detach()};
    for (at::Tensor& x : torch::autograd::grad({out}, leaves, {d_out.to(dtype)})) {
      results.push_back(x);
    }
    return results;
  }
};

// Emulated ones, and those of this CPU.
std::vector<const TileKernels<Bf16>*> amx_kernels() {
  std::vector<const TileKernels<Bf16>*> all{&emulated_amx_tile_kernels()};
  if (is_supported(InstructionSet::kAmxBf16)) {
    all.push_back(&tile_kernels<Bf16>(InstructionSet::kAmxBf16));
  }
  return all;
}

TEST(Amx, ResultsAreAsExactAsTheReference) {
  for (const std::int64_t D : {16, 48, 64, 160}) {
    for (const std::int64_t num_queries : {16, 21, 48, 64}) {
      for (const std::int64_t num_keys : {9, 32, 48, 64}) {
        const TwoTiles problem(num_queries, num_keys, D);
        const auto exact = problem.by_autograd(at::kDouble);
        const auto reference = problem.by_autograd(at::kBFloat16);
        for (const TileKernels<Bf16>* kernels : amx_kernels()) {
          const auto results = problem.by_kernels(*kernels);
          for (std::size_t i = 0; i < exact.size(); ++i) {
            expect_as_exact(
                results[i], reference[i], exact[i],
                fmt::format("result {}, {} queries, {} keys, D {}", i, num_queries, num_keys, D));
          }
        }
      }
    }
  }
}

// AMX adds in another order than vdpbf16ps; where sizes do not fit, vdpbf16ps multiplies.
TEST(Amx, MultipliesSizesOfWholeRegisters) {
  const auto same_bits = [](const TwoTiles& problem) {
    const auto amx = problem.by_kernels(emulated_amx_tile_kernels());
    const auto pairs = problem.by_kernels(emulated_tile_kernels(Bf16{}));
    bool same = true;
    for (std::size_t i = 0; i < amx.size(); ++i) same = same && at::equal(amx[i], pairs[i]);
    return same;
  };
  EXPECT_FALSE(same_bits({64, 64, 64}));
  EXPECT_FALSE(same_bits({16, 48, 240}));
  EXPECT_TRUE(same_bits({64, 64, 20}));
  EXPECT_TRUE(same_bits({24, 40, 20}));
}

void expect_bits_of_the_cpu(InstructionSet set, const TileKernels<Bf16>& emulated) {
  for (const std::int64_t D : {16, 20, 64, 256}) {
    const TwoTiles problem(64, 64, D);
    EXPECT_TRUE(at::equal(problem.by_kernels(tile_kernels<Bf16>(set)).back(),
                          problem.by_kernels(emulated).back()))
        << "D " << D;
  }
}

TEST(EmulatedBf16Products, OfPairsHaveTheBitsOfTheCpu) {
  if (!is_supported(InstructionSet::kAvx512Bf16)) GTEST_SKIP() << "this CPU has no AVX-512 BF16";
  expect_bits_of_the_cpu(InstructionSet::kAvx512Bf16, emulated_tile_kernels(Bf16{}));
}

TEST(EmulatedBf16Products, OfMatricesHaveTheBitsOfTheCpu) {
  if (!is_supported(InstructionSet::kAmxBf16)) GTEST_SKIP() << "this CPU has no AMX";
  expect_bits_of_the_cpu(InstructionSet::kAmxBf16, emulated_amx_tile_kernels());
}

}  // namespace
}  // namespace birkhoff::test
