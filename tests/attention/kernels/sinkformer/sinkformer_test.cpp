// Doubly stochastic attention: the reference against Sinkhorn's algorithm as the paper writes it
// and against its properties; the kernels of each instruction set against the reference in fp64.
// Legend: B batch, H heads, L queries, S keys, D head dim.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>
#include <vector>

#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/sinkformer/sinkformer.h"
#include "cluster/base/error.h"
#include "tests/attention/kernels/tile_attention/avx512_emulated.h"
#include "tests/attention/kernels/tile_attention/one_head.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

using Attention = DoublyStochasticAttention;
constexpr int kConverged = 601;

Attention problem(std::int64_t L, std::int64_t S, int half_steps,
                  at::ScalarType dtype = at::kDouble, std::int64_t D = 5) {
  const auto leaf = [&](std::int64_t rows, std::uint64_t seed) {
    return random_tensor({2, 2, rows, D}, dtype, seed).set_requires_grad(true);
  };
  Attention in;
  in.q_BHLD = leaf(L, 1);
  in.k_BHSD = leaf(S, 2);
  in.v_BHSD = leaf(S, 3);
  in.half_steps = half_steps;
  return in;
}

std::vector<at::Tensor> leaves_of(const Attention& in) { return {in.q_BHLD, in.k_BHSD, in.v_BHSD}; }
at::Tensor attend(const Attention& in) { return attend_doubly_stochastic(in, Path::kReference); }

// The attention matrix: the outputs for one-hot values.
at::Tensor matrix_of(Attention in) {
  const std::int64_t S = in.k_BHSD.size(2);
  in.v_BHSD = at::eye(S, in.q_BHLD.options()).expand({2, 2, S, S});
  return attend(in).detach();
}

at::Tensor scores_of(const Attention& in) {
  return at::matmul(in.q_BHLD, in.k_BHSD.transpose(2, 3)) /
         std::sqrt(static_cast<double>(in.q_BHLD.size(3)));
}

TEST(DoublyStochastic, EqualsAlternatingNormalizationOfTheWholeMatrix) {
  for (const auto& [L, S] : {std::pair(6, 6), {4, 9}, {9, 4}}) {
    for (const int half_steps : {1, 3, 5, 21}) {
      const Attention in = problem(L, S, half_steps);
      at::Tensor k = scores_of(in).exp();
      for (int t = 1; t <= half_steps; ++t) {
        k = t % 2 == 1 ? k / k.sum(3, true)
                       : k / k.sum(2, true) * (static_cast<double>(L) / static_cast<double>(S));
      }
      EXPECT_LE(max_difference(matrix_of(in), k), 1e-13) << L << " x " << S << " T " << half_steps;
    }
  }
}

TEST(DoublyStochastic, OneHalfStepIsSoftmax) {
  const Attention in = problem(7, 7, 1);
  EXPECT_LE(max_difference(matrix_of(in), at::softmax(scores_of(in), 3)), 1e-15);
}

TEST(DoublyStochastic, RowsSumToOneAndColumnsInTheLimit) {
  for (const auto& [L, S] : {std::pair(8, 8), {5, 10}}) {
    double last = 1e9;
    for (const int half_steps : {1, 3, 7, 21, kConverged}) {
      const at::Tensor p = matrix_of(problem(L, S, half_steps));
      EXPECT_LE(max_difference(p.sum(3), at::ones({2, 2, L}, at::kDouble)), 1e-13);
      const double error = max_difference(
          p.sum(2),
          at::full({2, 2, S}, static_cast<double>(L) / static_cast<double>(S), at::kDouble));
      EXPECT_LT(error, last);
      last = error;
    }
    EXPECT_LE(last, 1e-12);
  }
}

// Proposition 1 of the paper: S + f_i + g_j has the limit of S. f_i changes nothing after any
// number of half-steps, because rows are first.
TEST(DoublyStochastic, ShiftsOfRowsAndColumnsDoNotChangeTheLimit) {
  const auto shifted = [](int half_steps, double rows, double columns) {
    Attention in = problem(6, 6, half_steps);
    const double root = std::sqrt(7.0);
    const at::Tensor ones = at::ones({2, 2, 6, 1}, at::kDouble);
    in.q_BHLD = at::cat({in.q_BHLD * (root / std::sqrt(5.0)),
                         random_tensor({2, 2, 6, 1}, at::kDouble, 8) * (rows * root), ones},
                        3);
    in.k_BHSD = at::cat(
        {in.k_BHSD, ones, random_tensor({2, 2, 6, 1}, at::kDouble, 9) * (columns * root)}, 3);
    return matrix_of(in);
  };
  for (const int half_steps : {1, 3, kConverged}) {
    EXPECT_LE(max_difference(shifted(half_steps, 2, 0), shifted(half_steps, 0, 0)), 1e-12);
  }
  EXPECT_GT(max_difference(shifted(3, 0, 2), shifted(3, 0, 0)), 1e-2);
  EXPECT_LE(max_difference(shifted(kConverged, 0, 2), shifted(kConverged, 0, 0)), 1e-12);
}

TEST(DoublyStochastic, PermutedQueriesAndKeysPermuteTheMatrix) {
  Attention in = problem(6, 8, 5);
  const at::Tensor rows = at::tensor({3, 0, 5, 1, 2, 4}, at::kLong),
                   columns = at::tensor({7, 2, 0, 4, 6, 1, 3, 5}, at::kLong),
                   before = matrix_of(in);
  in.q_BHLD = in.q_BHLD.index_select(2, rows);
  in.k_BHSD = in.k_BHSD.index_select(2, columns);
  EXPECT_LE(max_difference(matrix_of(in), before.index_select(2, rows).index_select(3, columns)),
            1e-13);
}

// A coupling of one query with uniform marginals is uniform: a set pooled by one seed is its mean.
TEST(DoublyStochastic, OneQueryTakesTheMean) {
  EXPECT_LE(
      max_difference(matrix_of(problem(1, 9, 3)), at::full({2, 2, 1, 9}, 1.0 / 9, at::kDouble)),
      1e-14);
}

TEST(DoublyStochastic, AnEvenNumberOfHalfStepsIsRefused) {
  EXPECT_THROW(attend(problem(4, 4, 2)), Error);
  EXPECT_THROW(attend(problem(4, 4, 0)), Error);
  EXPECT_THROW(attend(problem(4, 4, 1001)), Error);
}

double loss_of(const Attention& in) {
  const at::NoGradGuard no_grad;
  const at::Tensor out = attend(in);
  return (out * random_tensor(out.sizes(), at::kDouble, 7)).sum().item<double>();
}

// The unrolled gradient is that of the half-steps made; the implicit one that of the limit.
TEST(DoublyStochastic, GradientsEqualFiniteDifferences) {
  for (const auto& [half_steps, gradient] : {std::pair(1, BalanceGradient::kUnrolled),
                                             {3, BalanceGradient::kUnrolled},
                                             {7, BalanceGradient::kUnrolled},
                                             {kConverged, BalanceGradient::kImplicit}}) {
    for (const Path path : {Path::kReference, Path::kFused}) {
      Attention in = problem(5, 7, half_steps);
      in.gradient = gradient;
      const auto d = gradients(attend_doubly_stochastic(in, path), leaves_of(in));
      const std::vector<at::Tensor> all = leaves_of(in);
      for (std::size_t leaf = 0; leaf < all.size(); ++leaf) {
        const at::Tensor direction = random_tensor(all[leaf].sizes(), at::kDouble, 20 + leaf);
        const double step = 1e-6;
        all[leaf].data().add_(direction, step);
        const double above = loss_of(in);
        all[leaf].data().add_(direction, -2 * step);
        const double difference = (above - loss_of(in)) / (2 * step);
        all[leaf].data().add_(direction, step);
        EXPECT_NEAR((d[leaf] * direction).sum().item<double>(), difference,
                    1e-7 * std::max(1.0, std::abs(difference)))
            << "T " << half_steps << " leaf " << leaf;
      }
    }
  }
}

TEST(DoublyStochastic, ImplicitEqualsUnrolledInTheLimitOnly) {
  for (const Path path : {Path::kReference, Path::kFused}) {
    const auto difference = [&](int half_steps) {
      Attention in = problem(6, 8, half_steps);
      const auto unrolled = gradients(attend_doubly_stochastic(in, path), leaves_of(in));
      in.gradient = BalanceGradient::kImplicit;
      const auto implicit = gradients(attend_doubly_stochastic(in, path), leaves_of(in));
      return std::max(max_difference(unrolled[0], implicit[0]),
                      max_difference(unrolled[1], implicit[1]));
    };
    EXPECT_LE(difference(kConverged), 1e-10);
    EXPECT_GT(difference(3), 1e-3);
  }
}

// The equation is singular, and in fp32 its null vector must not be stepped along.
TEST(DoublyStochastic, TheImplicitGradientInFp32IsNearThatInFp64) {
  for (const std::int64_t L : {4, 5, 7, 10, 14, 20, 33, 50, 77, 100}) {
    for (const std::int64_t S : {L, L + 3}) {
      Attention in = problem(L, S, kConverged, at::kFloat);
      in.gradient = BalanceGradient::kImplicit;
      Attention wide = in;
      for (at::Tensor* x : {&wide.q_BHLD, &wide.k_BHSD, &wide.v_BHSD}) {
        *x = x->detach().to(at::kDouble).set_requires_grad(true);
      }
      const auto exact = gradients(attend_doubly_stochastic(wide, Path::kFused), leaves_of(wide));
      for (const Path path : {Path::kReference, Path::kFused}) {
        const auto d = gradients(attend_doubly_stochastic(in, path), leaves_of(in));
        for (std::size_t leaf = 0; leaf < d.size(); ++leaf) {
          EXPECT_LE(max_difference(d[leaf].to(at::kDouble), exact[leaf]),
                    1e-4 * std::max(1.0, exact[leaf].abs().max().item<double>()))
              << L << " x " << S << ", leaf " << leaf << ", path " << static_cast<int>(path);
        }
      }
    }
  }
}

// The truncated gradient leaves out a good part.
TEST(DoublyStochastic, TheTruncatedGradientIsAnother) {
  for (const Path path : {Path::kReference, Path::kFused}) {
    Attention in = problem(4, 4, 3);
    const auto unrolled = gradients(attend_doubly_stochastic(in, path), leaves_of(in));
    in.gradient = BalanceGradient::kTruncated;
    const auto truncated = gradients(attend_doubly_stochastic(in, path), leaves_of(in));
    EXPECT_GT((truncated[0] - unrolled[0]).norm().item<double>(),
              0.05 * unrolled[0].norm().item<double>());
    EXPECT_LE(max_difference(truncated[2], unrolled[2]), 1e-12);  // values do not balance
  }
}

// Masses are those of what exists: as if padding were not there, also for queries.
TEST(DoublyStochastic, PaddingHasNoMass) {
  Attention in = problem(9, 12, 5);
  in.query_lengths_B = at::tensor({6, 9}, at::kLong);
  in.key_lengths_B = at::tensor({12, 7}, at::kLong);
  const auto cut = [](const at::Tensor& x, std::int64_t b, std::int64_t rows) {
    return x.detach().narrow(0, b, 1).narrow(2, 0, rows).clone();
  };
  for (const Path path : {Path::kReference, Path::kFused}) {
    const at::Tensor out = attend_doubly_stochastic(in, path);
    for (const auto& [b, n, m] : {std::tuple(0, 6, 12), {1, 9, 7}}) {
      Attention one = in;
      one.query_lengths_B = one.key_lengths_B = at::Tensor();
      one.q_BHLD = cut(in.q_BHLD, b, n);
      one.k_BHSD = cut(in.k_BHSD, b, m);
      one.v_BHSD = cut(in.v_BHSD, b, m);
      EXPECT_LE(max_difference(cut(out, b, n), attend_doubly_stochastic(one, path)), 1e-13);
    }
    EXPECT_EQ(out.detach()[0].narrow(1, 6, 3).abs().max().item<double>(), 0);
  }
}

TEST(DoublyStochastic, AKeyHeadServesItsQueryHeads) {
  Attention in = problem(6, 6, 3);
  const auto one_head = [](const at::Tensor& x) {
    return x.detach().narrow(1, 0, 1).clone().set_requires_grad(true);
  };
  in.k_BHSD = one_head(in.k_BHSD);
  in.v_BHSD = one_head(in.v_BHSD);
  const auto d = gradients(attend(in), leaves_of(in));
  const at::Tensor fused = attend_doubly_stochastic(in, Path::kFused);
  EXPECT_LE(max_difference(fused, attend(in)), 1e-13);
  const auto d_fused = gradients(fused, leaves_of(in));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_LE(max_difference(d_fused[i], d[i]), 1e-12) << i;
}

// ---- The kernels of each set, one head.

template <typename T>
HeadResults run_head(const SinkformerKernels<T>& kernels, const SinkformerShape& shape,
                     const HeadProblem& in) {
  const at::TensorOptions sums = in.q.options().dtype(at::toOpMathType(in.q.scalar_type()));
  const std::int64_t pairs = shape.half_steps / 2;
  const at::Tensor rows = at::empty({pairs + 1, shape.max_queries}, sums),
                   columns = at::empty({pairs, shape.max_keys}, sums),
                   exact = at::empty(in.q.sizes(), sums);
  SinkformerHead<T> head;
  const HeadResults results = set_rows(head, in);
  head.row_potentials = static_cast<Sum<T>*>(rows.mutable_data_ptr());
  head.column_potentials = static_cast<Sum<T>*>(columns.mutable_data_ptr());
  head.exact_out = static_cast<Sum<T>*>(exact.mutable_data_ptr());
  const ScratchMemory scratch = scratch_memory(kernels.scratch_bytes(shape));
  kernels.forward(shape, head, scratch.get());
  kernels.backward(shape, head, scratch.get());
  return results;
}

HeadResults reference_of(const SinkformerShape& shape, at::ScalarType dtype,
                         const HeadProblem& of) {
  const auto leaf = [&](const at::Tensor& x) {
    return x.to(dtype).unsqueeze(0).unsqueeze(0).set_requires_grad(true);
  };
  Attention in;
  in.q_BHLD = leaf(of.q);
  in.k_BHSD = leaf(of.k);
  in.v_BHSD = leaf(of.v);
  in.half_steps = shape.half_steps;
  in.gradient = shape.gradient;
  const at::Tensor out = attend(in);
  const auto d = torch::autograd::grad({(out * of.d_out.to(dtype)).sum()}, leaves_of(in));
  const auto squeeze = [](const at::Tensor& x) { return x.detach()[0][0]; };
  return {squeeze(out), squeeze(d[0]), squeeze(d[1]), squeeze(d[2])};
}

// `sharpness`: factor of the scores and, with them, of their rounding errors. Weights are cached if
// `cached`.
template <typename T>
void expect_balanced_reference(at::ScalarType dtype, double sharpness = 1, bool cached = true) {
  for (const auto& [L, S, D, half_steps, gradient] :
       {std::tuple(5, 5, 3, 1, BalanceGradient::kUnrolled),
        {37, 70, 20, 3, BalanceGradient::kUnrolled},
        {130, 61, 64, 5, BalanceGradient::kUnrolled},
        {64, 128, 96, 3, BalanceGradient::kTruncated},
        {40, 33, 16, 201, BalanceGradient::kImplicit},
        {1, 1, 7, 3, BalanceGradient::kUnrolled}}) {
    SinkformerShape shape;
    shape.max_queries = L + 3;  // some padding
    shape.max_keys = S;
    shape.head_dim = D;
    shape.half_steps = half_steps;
    shape.scale = 1 / std::sqrt(static_cast<double>(D));
    shape.gradient = gradient;
    if (!cached) shape.max_cached_bytes = 0;
    // With large scores, T = 201 is far from the limit.
    if (sharpness > 1 && gradient == BalanceGradient::kImplicit) continue;
    HeadProblem in = random_head(L, S, D, dtype);
    in.q *= sharpness;
    const HeadResults exact = reference_of(shape, at::kDouble, in),
                      plain = reference_of(shape, dtype, in);
    const double rounding = dtype == at::kBFloat16 ? 0x1p-8
                            : dtype == at::kFloat  ? 0x1p-23
                                                   : 0x1p-48;
    const double solved =
        gradient == BalanceGradient::kImplicit ? 100 : 1;  // the solver's residual
    const auto check = [&](const SinkformerKernels<T>& kernels, const std::string& name) {
      const HeadResults fused = run_head(kernels, shape, in);
      for (std::size_t i = 0; i < 4; ++i) {
        // Weights near 0 and 1 cancel in gradients.
        const double size = std::max(sharpness > 1 ? 1.0 : 1e-3,
                                     exact.all()[i].abs().max().template item<double>());
        EXPECT_LE(max_difference(fused.all()[i], exact.all()[i]),
                  2 * max_difference(plain.all()[i], exact.all()[i]) +
                      4 * solved * sharpness * rounding * size)
            << name << fmt::format(", {} x {} D {} T {}, result {}", L, S, D, half_steps, i);
      }
    };
    for_each_set(
        [](InstructionSet set) -> const SinkformerKernels<T>& {
          return sinkformer_kernels<T>(set);
        },
        emulated_sinkformer_kernels(T{}), check);
  }
}

TEST(SinkformerKernel, EqualsReferenceInFp32) { expect_balanced_reference<float>(at::kFloat); }
TEST(SinkformerKernel, EqualsReferenceInFp64) { expect_balanced_reference<double>(at::kDouble); }
TEST(SinkformerKernel, EqualsReferenceInBf16) { expect_balanced_reference<Bf16>(at::kBFloat16); }

// Weights are computed by each pass.
TEST(SinkformerKernel, WithoutACacheEqualsReference) {
  expect_balanced_reference<float>(at::kFloat, 1, /*cached=*/false);
  expect_balanced_reference<double>(at::kDouble, 1, /*cached=*/false);
}

// Potentials are so far apart that factors of weights would overflow.
TEST(SinkformerKernel, WithLargeScoresEqualsReference) {
  for (const bool cached : {true, false}) {
    expect_balanced_reference<float>(at::kFloat, 60, cached);
    expect_balanced_reference<double>(at::kDouble, 60, cached);
    expect_balanced_reference<float>(at::kFloat, 300, cached);  // factors would overflow
  }
}

// Four times the tokens, four times the scratch: no matrix of all scores.
TEST(SinkformerKernel, ScratchGrowsWithTheLengthAlone) {
  const SinkformerKernels<float>& kernels = sinkformer_kernels<float>(InstructionSet::kPortable);
  const auto bytes = [&](int tokens) {
    SinkformerShape shape;
    shape.max_queries = shape.max_keys = tokens;
    shape.head_dim = 64;
    shape.half_steps = 5;
    return static_cast<double>(kernels.scratch_bytes(shape));
  };
  EXPECT_LE(bytes(16384) / bytes(4096), 4.01);
}

}  // namespace
}  // namespace birkhoff::test
