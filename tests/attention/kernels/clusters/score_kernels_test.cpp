// The scores of clusters and of blocks: the kernels of each instruction set of this machine, and
// the AVX-512 ones, emulated, against plain operations in fp64. Legend: D head dim, K clusters.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/kernels/common/cpu_scratch.h"
#include "tests/attention/kernels/tile_attention/avx512_emulated.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

template <typename T>
T* data_of(const at::Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

struct Scores {
  at::Tensor unit, inverse, scores, best, best_score;
};

// What a set gives for rows x [rows, D] and centroids [K, D].
template <typename T>
Scores scores_of(const ScoreKernels<T>& kernels, const ScoreShape& shape, const at::Tensor& x,
                 const at::Tensor& centroids) {
  using S = Sum<T>;
  const std::int64_t rows = x.size(0), padded = shape.padded_clusters<S>();
  const at::TensorOptions sums = centroids.options();
  const Scores result{at::empty_like(x), at::empty({rows}, sums), at::empty({kTile, padded}, sums),
                      at::empty({rows}, sums.dtype(at::kInt)), at::empty({rows}, sums)};
  const at::Tensor centroids_DK =
      at::constant_pad_nd(centroids.t(), {0, padded - shape.clusters}).contiguous();
  const ScratchMemory scratch = scratch_memory(kernels.scratch_bytes(shape.head_dim));
  kernels.score(shape, data_of<S>(centroids_DK),
                {.num_rows = static_cast<int>(rows),
                 .x = {data_of<T>(x), x.size(1)},
                 .unit = {data_of<T>(result.unit), x.size(1)},
                 .inverse = data_of<S>(result.inverse),
                 .scores = data_of<S>(result.scores),
                 .best = data_of<std::int32_t>(result.best),
                 .best_score = data_of<S>(result.best_score)},
                scratch.get());
  return {result.unit, result.inverse, result.scores.narrow(0, 0, rows), result.best,
          result.best_score};
}

template <typename T, typename F>
void for_each_score_kernels(const F& f) {
  for_each_set([](InstructionSet set) -> const ScoreKernels<T>& { return score_kernels<T>(set); },
               emulated_score_kernels(T{}), f);
}

template <typename T>
void expect_definition(at::ScalarType dtype, double tolerance, double rounding) {
  const at::ScalarType sum_dtype = at::toOpMathType(dtype);
  for (const auto& [rows, D, K] :
       {std::tuple(1, 1, 1), {3, 3, 5}, {64, 20, 16}, {17, 64, 33}, {9, 256, 64}, {40, 7, 17}}) {
    const at::Tensor x = random_tensor({rows, D}, dtype, 1),
                     centroids = random_tensor({K, D}, sum_dtype, 2);
    const ScoreShape shape{D, K, 1.5};
    const at::Tensor wide = x.to(at::kDouble), norm = wide.norm(2, {1}, true), u = wide / norm,
                     exact = at::matmul(u, centroids.to(at::kDouble).t());
    for_each_score_kernels<T>([&](const ScoreKernels<T>& kernels, const std::string& name) {
      SCOPED_TRACE(::testing::Message() << name << " rows " << rows << " D " << D << " K " << K);
      const Scores result = scores_of<T>(kernels, shape, x, centroids);
      EXPECT_LE(max_difference(result.unit, 1.5 * u), rounding);
      EXPECT_LE(max_difference(result.inverse * norm.squeeze(1), at::ones({rows})), tolerance);
      EXPECT_LE(max_difference(result.scores.narrow(1, 0, K), exact), tolerance);
      const at::Tensor padding = result.scores.narrow(1, K, result.scores.size(1) - K);
      EXPECT_TRUE(padding.eq(-std::numeric_limits<double>::infinity()).all().item<bool>());
      EXPECT_TRUE(at::equal(result.best.to(at::kLong), result.scores.argmax(1)));
      EXPECT_TRUE(at::equal(result.best_score, result.scores.amax(1)));
      // d_x of a row from both gradients: of length u and of |u - centroid|^2.
      const at::Tensor d_unit = random_tensor({D}, dtype, 3), d_x = at::empty({D}, x.options());
      const ScratchMemory scratch = scratch_memory(kernels.scratch_bytes(D));
      kernels.row_gradient(shape,
                           {.unit = data_of<T>(result.unit),
                            .d_unit = data_of<T>(d_unit),
                            .inverse = data_of<Sum<T>>(result.inverse)[0],
                            .d_distance = Sum<T>{0.5},
                            .centroid = data_of<Sum<T>>(centroids),
                            .d_x = data_of<T>(d_x)},
                           scratch.get());
      const at::Tensor of_u = 1.5 * d_unit.to(at::kDouble) + (u[0] - centroids[0].to(at::kDouble));
      const at::Tensor expected = (of_u - u[0] * (of_u * u[0]).sum()) / norm[0];
      EXPECT_LE(max_difference(d_x, expected),
                rounding * std::max(1.0, of_u.norm().item<double>() / norm[0].item<double>()));
    });
  }
}

TEST(ScoreKernels, EachSetGivesTheDefinition) {
  expect_definition<float>(at::kFloat, 1e-5, 1e-5);
  expect_definition<double>(at::kDouble, 1e-13, 1e-13);
  expect_definition<Bf16>(at::kBFloat16, 1e-5, 2e-2);
}

// Of equal scores the first, whichever lanes they are in; NaN and rows of zeros as documented.
template <typename T>
void expect_ends(at::ScalarType dtype) {
  for_each_score_kernels<T>([&](const ScoreKernels<T>& kernels, const std::string& name) {
    const at::Tensor centroids = at::zeros({40, 3}, at::toOpMathType(dtype));
    for (const int first : {0, 5, 15, 16, 33}) {
      centroids.zero_();
      for (int c = first; c < 40; c += 3) centroids[c][1] = 1;
      at::Tensor x = at::zeros({3, 3}, at::device(at::kCPU).dtype(dtype));
      x[0][1] = 2;
      x[1].fill_(std::nan(""));
      const Scores result = scores_of<T>(kernels, {3, 40}, x, centroids);
      EXPECT_EQ(result.best[0].item<int>(), first) << name;
      EXPECT_EQ(result.best_score[0].item<double>(), 1) << name;
      EXPECT_EQ(result.best[1].item<int>(), 0) << name;
      EXPECT_TRUE(std::isnan(result.best_score[1].item<double>())) << name;
      EXPECT_EQ(result.inverse[2].item<double>(), 0) << name;
      EXPECT_EQ(result.unit[2].abs().max().item<double>(), 0) << name;
      EXPECT_EQ(result.best[2].item<int>(), 0) << name;
    }
  });
}

TEST(ScoreKernels, TheFirstOfEqualScoresIsTheBestInEachSet) {
  expect_ends<float>(at::kFloat);
  expect_ends<double>(at::kDouble);
  expect_ends<Bf16>(at::kBFloat16);
}

}  // namespace
}  // namespace birkhoff::test
