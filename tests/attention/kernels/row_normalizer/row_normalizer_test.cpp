// Row normalizers against the closed forms of the papers and their properties; the kernels of each
// instruction set against the reference in fp64. Legend: B batch, H heads, L queries, S keys, D
// head dim.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>
#include <vector>

#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/row_normalizer/row_normalizer.h"
#include "tests/attention/kernels/tile_attention/avx512_emulated.h"
#include "tests/attention/kernels/tile_attention/one_head.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

at::Tensor scores(std::uint64_t seed = 1, std::int64_t S = 13) {
  return (2 * random_tensor({2, 2, 6, S}, at::kDouble, seed)).set_requires_grad(true);
}
RowNormalizer entmax_of(double alpha) {
  return {.kind = Normalizer::kEntmax, .alpha_H = at::full({2}, alpha, at::kDouble)};
}
at::Tensor weights(const RowNormalizer& normalizer, const at::Tensor& z,
                   const at::Tensor& mask = {}, const at::Tensor& sink = {}) {
  return normalize_rows(normalizer, z, mask, sink);
}

// Martins and Astudillo 2016, algorithm 1: sorted scores give the threshold.
at::Tensor sorted_sparsemax(const at::Tensor& z) {
  const at::Tensor sorted = std::get<0>(z.sort(-1, true)), sums = sorted.cumsum(-1),
                   j = at::arange(1, z.size(-1) + 1, at::kDouble),
                   rho = (1 + j * sorted > sums).sum(-1, true);
  return (z - (sums.gather(-1, rho - 1) - 1) / rho).clamp_min(0);
}

// Peters et al. 2019, algorithm 2.
at::Tensor sorted_entmax15(const at::Tensor& raw) {
  const at::Tensor z = raw / 2, sorted = std::get<0>(z.sort(-1, true)),
                   j = at::arange(1, z.size(-1) + 1, at::kDouble), mean = sorted.cumsum(-1) / j,
                   square = sorted.square().cumsum(-1) / j,
                   tau = mean - ((1 - j * (square - mean.square())) / j).clamp_min(0).sqrt(),
                   count = (tau <= sorted).sum(-1, true);
  return (z - tau.gather(-1, count - 1)).clamp_min(0).square();
}

TEST(RowNormalizer, EqualsTheSortedForms) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const at::Tensor z = scores(seed).detach();
    EXPECT_LE(max_difference(weights({.kind = Normalizer::kSparsemax}, z), sorted_sparsemax(z)),
              1e-14);
    EXPECT_LE(max_difference(weights({.kind = Normalizer::kEntmax15}, z), sorted_entmax15(z)),
              1e-14);
  }
}

TEST(RowNormalizer, ExponentsConnectSoftmaxAndSparsemax) {
  const at::Tensor z = scores().detach();
  EXPECT_LE(max_difference(weights(entmax_of(2), z), weights({.kind = Normalizer::kSparsemax}, z)),
            1e-14);
  EXPECT_LE(max_difference(weights(entmax_of(1.5), z), weights({.kind = Normalizer::kEntmax15}, z)),
            1e-14);
  for (const double alpha : {1.3, 1.1, 1.01, 1.001}) {
    EXPECT_LE(max_difference(weights(entmax_of(alpha), z), at::softmax(z, -1)), 1.5 * (alpha - 1));
  }
}

const std::vector<RowNormalizer> kSparse = {{.kind = Normalizer::kTopK, .top_k = 3},
                                            {.kind = Normalizer::kSparsemax},
                                            {.kind = Normalizer::kEntmax15},
                                            entmax_of(1.2)};

TEST(RowNormalizer, WeightsSumToOneWithExactZeros) {
  for (const RowNormalizer& each : kSparse) {
    const at::Tensor p = weights(each, scores().detach());
    EXPECT_LE(max_difference(p.sum(-1), at::ones({2, 2, 6}, at::kDouble)), 1e-14);
    EXPECT_GT((p == 0).sum().item<std::int64_t>(), 0);
    EXPECT_GE(p.min().item<double>(), 0);
    // A shift of a row changes nothing.
    const at::Tensor shift = random_tensor({2, 2, 6, 1}, at::kDouble, 4);
    EXPECT_LE(max_difference(weights(each, scores().detach() + 5 * shift), p), 1e-13);
  }
}

TEST(RowNormalizer, HiddenKeysCountForNothing) {
  const at::Tensor z = scores().detach();
  at::Tensor mask = at::ones({1, 1, 6, 13}, at::kBool).tril(3);
  mask.select(2, 4).fill_(false);
  for (const RowNormalizer& each : kSparse) {
    const at::Tensor leaf = z.clone().set_requires_grad(true), p = weights(each, leaf, mask);
    for (std::int64_t i = 0; i < 6; ++i) {
      if (i == 4) {
        EXPECT_EQ(p.select(2, i).abs().max().item<double>(), 0);
        continue;
      }
      const std::int64_t seen = std::min<std::int64_t>(13, i + 4);
      const at::Tensor row = z.narrow(2, i, 1).narrow(3, 0, seen);
      EXPECT_LE(max_difference(p.narrow(2, i, 1).narrow(3, 0, seen), weights(each, row)), 1e-14);
    }
    const at::Tensor d = gradients(p, {leaf})[0];
    EXPECT_EQ(d.masked_select(mask.logical_not().expand_as(d)).abs().max().item<double>(), 0);
    EXPECT_TRUE(d.isfinite().all().item<bool>());
  }
}

// A sink is one more key, whose weight is left out.
TEST(RowNormalizer, ASinkIsOneMoreKey) {
  const at::Tensor z = scores().detach(), sink = at::tensor({1.5, -0.5}, at::kDouble);
  const at::Tensor all = at::cat({z, sink.view({1, 2, 1, 1}).expand({2, 2, 6, 1})}, -1);
  for (const RowNormalizer& each : kSparse) {
    if (each.kind == Normalizer::kTopK) continue;
    EXPECT_LE(max_difference(weights(each, z, {}, sink), weights(each, all).narrow(-1, 0, 13)),
              1e-14);
  }
  const at::Tensor p = weights(kSparse[0], z, {}, sink);
  EXPECT_EQ((p > 0).sum(-1).min().item<std::int64_t>(), 3);  // it takes no key's place
  EXPECT_LT(p.sum(-1).max().item<double>(), 1);
}

TEST(RowNormalizer, GradientsEqualFiniteDifferences) {
  for (RowNormalizer each : kSparse) {
    const at::Tensor z = scores(3);
    std::vector<at::Tensor> all{z};
    if (each.alpha_H.defined()) {
      each.alpha_H = at::tensor({1.2, 1.7}, at::kDouble).set_requires_grad(true);
      all.push_back(each.alpha_H);
    }
    const auto loss = [&] {
      const at::NoGradGuard no_grad;
      return (weights(each, z) * random_tensor(z.sizes(), at::kDouble, 7)).sum().item<double>();
    };
    const auto d = gradients(weights(each, z), all);
    for (std::size_t leaf = 0; leaf < all.size(); ++leaf) {
      const at::Tensor direction = random_tensor(all[leaf].sizes(), at::kDouble, 30 + leaf);
      all[leaf].data().add_(direction, 1e-7);
      const double above = loss();
      all[leaf].data().add_(direction, -2e-7);
      const double difference = (above - loss()) / 2e-7;
      all[leaf].data().add_(direction, 1e-7);
      EXPECT_NEAR((d[leaf] * direction).sum().item<double>(), difference,
                  1e-6 * std::max(1.0, std::abs(difference)))
          << static_cast<int>(each.kind) << " leaf " << leaf;
    }
  }
}

// Top-k: the k largest scores that a query sees, chosen after masking; softmax among them.
TEST(TopK, KeepsTheLargestVisibleScores) {
  const at::Tensor z =
      at::tensor({5.0, 1.0, 4.0, 2.0, 3.0}, at::kDouble).view({1, 1, 1, 5}).repeat({1, 1, 2, 1});
  at::Tensor mask = at::ones({1, 1, 2, 5}, at::kBool);
  mask.select(2, 1).narrow(-1, 0, 1).fill_(false);  // the largest
  const at::Tensor p = weights({.kind = Normalizer::kTopK, .top_k = 2}, z, mask);
  const double e = std::exp(-1.0);
  EXPECT_LE(max_difference(p[0][0][0], at::tensor({1.0, 0.0, e, 0.0, 0.0}, at::kDouble) / (1 + e)),
            1e-15);
  EXPECT_LE(max_difference(p[0][0][1], at::tensor({0.0, 0.0, 1.0, 0.0, e}, at::kDouble) / (1 + e)),
            1e-15);
}

TEST(TopK, TiesAreKeptFirstComeOrAll) {
  const at::Tensor z = at::tensor({1.0, 2.0, 1.0, 1.0, 0.0}, at::kDouble).view({1, 1, 1, 5});
  const auto kept = [&](bool ties, std::int64_t k) {
    const at::Tensor p = weights({.kind = Normalizer::kTopK, .top_k = k, .keep_ties = ties}, z);
    return (p.flatten() > 0).to(at::kLong);
  };
  EXPECT_TRUE(at::equal(kept(false, 2), at::tensor({1, 1, 0, 0, 0}, at::kLong)));
  EXPECT_TRUE(at::equal(kept(true, 2), at::tensor({1, 1, 1, 1, 0}, at::kLong)));
  EXPECT_TRUE(at::equal(kept(false, 9), at::ones({5}, at::kLong)));
}

TEST(TopK, ADivisorKeepsAShareOfWhatAQuerySees) {
  const at::Tensor z = scores().detach(), mask = at::ones({1, 1, 6, 13}, at::kBool).tril(6);
  const at::Tensor p = weights({.kind = Normalizer::kTopK, .top_k = 2, .top_divisor = 4}, z, mask);
  // Of 7 to 12 visible keys a quarter, rounded up.
  EXPECT_TRUE(at::equal((p > 0).sum(-1)[0][0], at::tensor({2, 2, 3, 3, 3, 3}, at::kLong)));
}

// ---- The kernels of each set, one head.

struct RowProblem : HeadProblem {
  at::Tensor first{}, end{}, kept{};  // int32 [L]
  at::Tensor terms{};                 // [L, S]; undefined: none
};
struct RowResults : HeadResults {
  double d_alpha = 0;
  double d_alpha_size = 0;  // the sum of the absolute terms of queries; only of the reference
  at::Tensor d_terms{};
};

template <typename T>
RowResults run_head(const RowKernels<T>& kernels, const RowNormalizer& normalizer,
                    const RowProblem& in) {
  const at::TensorOptions sums = in.q.options().dtype(at::toOpMathType(in.q.scalar_type()));
  RowResults results;
  HeadShape shape;
  shape.max_queries = static_cast<int>(in.q.size(0)) + 2;
  shape.max_keys = static_cast<int>(in.k.size(0)) + 1;
  shape.head_dim = static_cast<int>(in.q.size(1));
  shape.scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
  const auto set = [&](auto& head) {
    static_cast<HeadResults&>(results) = set_rows(head, in);
    head.first = in.first.const_data_ptr<std::int32_t>();
    head.end = in.end.const_data_ptr<std::int32_t>();
    if (!in.terms.defined()) return;
    results.d_terms = at::zeros_like(in.terms);
    head.terms = {static_cast<const Sum<T>*>(in.terms.const_data_ptr()), in.terms.size(1)};
    head.d_terms = {static_cast<Sum<T>*>(results.d_terms.mutable_data_ptr()), in.terms.size(1)};
  };
  if (normalizer.kind == Normalizer::kTopK) {
    const TopKShape lists{shape, static_cast<int>(normalizer.top_k)};
    const at::Tensor index = at::empty({in.q.size(0), lists.kept}, at::kInt),
                     weight = at::empty(index.sizes(), sums);
    TopKHead<T> head;
    set(head);
    head.kept = in.kept.const_data_ptr<std::int32_t>();
    head.index = index.mutable_data_ptr<std::int32_t>();
    head.weight = static_cast<Sum<T>*>(weight.mutable_data_ptr());
    const ScratchMemory scratch = scratch_memory(kernels.top_k_scratch_bytes(lists));
    kernels.top_k_forward(lists, head, scratch.get());
    kernels.top_k_backward(lists, head, scratch.get());
    return results;
  }
  const at::Tensor threshold = at::empty({in.q.size(0)}, sums);
  EntmaxHead<T> head;
  set(head);
  head.alpha = normalizer.kind == Normalizer::kSparsemax ? Sum<T>{2}
               : normalizer.kind == Normalizer::kEntmax15
                   ? static_cast<Sum<T>>(1.5)
                   : static_cast<Sum<T>>(normalizer.alpha_H[0].template item<double>());
  head.threshold = static_cast<Sum<T>*>(threshold.mutable_data_ptr());
  if (normalizer.alpha_H.defined()) head.d_alpha = &results.d_alpha;
  const ScratchMemory scratch = scratch_memory(kernels.entmax_scratch_bytes(shape));
  kernels.entmax_forward(shape, head, scratch.get());
  kernels.entmax_backward(shape, head, scratch.get());
  return results;
}

RowResults reference_of(const RowNormalizer& normalizer, at::ScalarType dtype,
                        const RowProblem& in) {
  const auto leaf = [&](const at::Tensor& x) {
    return x.to(dtype).unsqueeze(0).unsqueeze(0).set_requires_grad(true);
  };
  const at::Tensor q = leaf(in.q), k = leaf(in.k), v = leaf(in.v),
                   key = at::arange(in.k.size(0), at::kInt),
                   mask = at::logical_and(key >= in.first.unsqueeze(1), key < in.end.unsqueeze(1));
  // Queries take the place of heads, so that each has an exponent.
  RowNormalizer of = normalizer;
  if (of.alpha_H.defined()) {
    of.alpha_H = of.alpha_H.narrow(0, 0, 1).repeat(in.q.size(0)).set_requires_grad(true);
  }
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor s = at::matmul(q.to(wide), k.to(wide).transpose(2, 3)), terms;
  if (in.terms.defined()) s = s + (terms = in.terms.to(wide).clone().set_requires_grad(true));
  s = s / std::sqrt(static_cast<double>(in.q.size(1)));
  const at::Tensor p = normalize_rows(of, s.transpose(1, 2), mask.unsqueeze(1), {}),
                   out = at::matmul(p.transpose(1, 2), v.to(wide)).to(dtype);
  std::vector<at::Tensor> leaves{q, k, v};
  if (of.alpha_H.defined()) leaves.push_back(of.alpha_H);
  if (terms.defined()) leaves.push_back(terms);
  const auto d = torch::autograd::grad({(out * in.d_out.to(dtype)).sum()}, leaves);
  const auto squeeze = [](const at::Tensor& x) { return x.detach()[0][0]; };
  RowResults results{{squeeze(out), squeeze(d[0]), squeeze(d[1]), squeeze(d[2])}};
  if (of.alpha_H.defined()) {
    results.d_alpha = d[3].sum().item<double>();
    results.d_alpha_size = d[3].abs().sum().item<double>();
  }
  if (terms.defined()) results.d_terms = d.back();
  return results;
}

template <typename T>
void expect_row_reference(at::ScalarType dtype) {
  for (const auto& [L, S, D, causal] : {std::tuple(5, 5, 3, true),
                                        {70, 37, 20, false},
                                        {133, 133, 64, true},
                                        {64, 200, 96, false},
                                        {1, 1, 7, true}}) {
    RowProblem in{random_head(L, S, D, dtype)};
    in.end = causal ? at::arange(1, L + 1, at::kInt) : at::full({L}, S - S / 7, at::kInt);
    in.first = causal ? (at::arange(L, at::kInt) - 40).clamp_min(0) : at::zeros({L}, at::kInt);
    if (L > 8) in.end[7] = in.first[7];  // a query that sees nothing
    if (D >= 64) in.terms = random_tensor({L, S}, at::toOpMathType(dtype), 5);
    for (const RowNormalizer& each :
         {RowNormalizer{.kind = Normalizer::kTopK, .top_k = 3},
          RowNormalizer{.kind = Normalizer::kTopK, .top_k = 64},
          RowNormalizer{.kind = Normalizer::kSparsemax},
          RowNormalizer{.kind = Normalizer::kEntmax15}, entmax_of(1.2), entmax_of(1.05)}) {
      in.kept = (in.end - in.first).clamp_max(each.top_k).to(at::kInt).contiguous();
      const RowResults exact = reference_of(each, at::kDouble, in),
                       plain = reference_of(each, dtype, in);
      const double rounding = dtype == at::kBFloat16 ? 0x1p-8
                              : dtype == at::kFloat  ? 0x1p-22
                                                     : 0x1p-46;
      const auto check = [&](const RowKernels<T>& kernels, const std::string& name) {
        const RowResults fused = run_head(kernels, each, in);
        const std::string what = name + fmt::format(", {} x {} D {}, normalizer {}", L, S, D,
                                                    static_cast<int>(each.kind));
        // Powers 1 / (a - 1) multiply relative errors.
        const double power =
            each.alpha_H.defined() ? 1 / (each.alpha_H[0].template item<double>() - 1) : 1;
        for (std::size_t i = 0; i < 4; ++i) {
          const double size = std::max(1e-3, exact.all()[i].abs().max().template item<double>());
          EXPECT_LE(
              max_difference(fused.all()[i], exact.all()[i]),
              2 * max_difference(plain.all()[i], exact.all()[i]) + 4 * power * rounding * size)
              << what << " result " << i;
        }
        if (in.terms.defined()) {
          const double size = exact.d_terms.abs().max().template item<double>();
          EXPECT_LE(max_difference(fused.d_terms, exact.d_terms),
                    2 * max_difference(plain.d_terms, exact.d_terms) + 4 * power * rounding * size)
              << what << " terms";
        }
        const double of_sums = dtype == at::kDouble ? 0x1p-46 : 0x1p-22;
        EXPECT_NEAR(fused.d_alpha, exact.d_alpha,
                    2 * std::abs(plain.d_alpha - exact.d_alpha) +
                        5 * power * power * of_sums * exact.d_alpha_size)
            << what;
      };
      for_each_set([](InstructionSet set) -> const RowKernels<T>& { return row_kernels<T>(set); },
                   emulated_row_kernels(T{}), check);
    }
  }
}

TEST(RowKernel, EqualsReferenceInFp32) { expect_row_reference<float>(at::kFloat); }
TEST(RowKernel, EqualsReferenceInFp64) { expect_row_reference<double>(at::kDouble); }
TEST(RowKernel, EqualsReferenceInBf16) { expect_row_reference<Bf16>(at::kBFloat16); }

// Of equal scores the kernel keeps the first.
TEST(RowKernel, TopKKeepsTheFirstOfEqualScores) {
  for_each_set(
      [](InstructionSet set) -> const RowKernels<float>& { return row_kernels<float>(set); },
      emulated_row_kernels(float{}),
      [&](const RowKernels<float>& kernels, const std::string& name) {
        RowProblem in{
            {at::ones({1, 4}), at::ones({150, 4}), at::zeros({150, 4}), at::ones({1, 4})}};
        for (const int key : {3, 7, 77}) in.v[key].fill_(key);
        in.k.narrow(0, 0, 3).fill_(0.5);
        in.k[149].fill_(1.25);  // takes the place of the last of the equal keys
        in.first = at::zeros({1}, at::kInt);
        in.end = at::full({1}, 150, at::kInt);
        in.kept = at::full({1}, 5, at::kInt);
        const RowResults results = run_head(kernels, {.kind = Normalizer::kTopK, .top_k = 5}, in);
        EXPECT_NEAR(results.out[0][0].item<double>(), 3.0 / (4 + std::exp(0.5)), 1e-6)
            << name << ": not keys 3 to 6 and 149";
      });
}

// NaN reaches only queries that see it and the keys that these see; the others keep their bits.
TEST(RowKernel, NaNStaysWithQueriesThatSeeIt) {
  constexpr std::int64_t kTokens = 150;
  const at::Tensor token = at::arange(kTokens, at::kInt);
  const auto check = [&](const RowKernels<float>& kernels, const RowNormalizer& normalizer,
                         std::size_t which, std::int64_t row, const std::string& what) {
    // Queries see three keys. `number` is in a row of q, k, v or d_out.
    const auto solve = [&](float number) {
      RowProblem in{random_head(kTokens, kTokens, 20, at::kFloat)};
      const std::vector<at::Tensor> inputs{in.q, in.k, in.v, in.d_out};
      inputs[which][row][3] = number;
      in.first = (token - 2).clamp_min(0);
      in.end = token + 1;
      in.kept = (in.end - in.first).clamp_max(normalizer.top_k).to(at::kInt).contiguous();
      return run_head(kernels, normalizer, in).all();
    };
    const std::vector<at::Tensor> nan = solve(NAN), finite = solve(0.5f);
    if (which != 2) {  // an output or a gradient of the query itself
      EXPECT_TRUE(nan[which == 3 ? 1 : 0][row].isnan().all().item<bool>()) << what;
    }
    const std::int64_t last = which == 1 || which == 2 ? row + 2 : row;  // query that sees it
    for (std::size_t i = 0; i < nan.size(); ++i) {
      const std::int64_t first = i < 2 ? row : row - 2;  // query, or key that these see
      const at::Tensor others = (token < first).logical_or(token > last).unsqueeze(1);
      EXPECT_TRUE(at::equal(nan[i].masked_select(others), finite[i].masked_select(others)))
          << what << " result " << i;
    }
  };
  for_each_set(
      [](InstructionSet set) -> const RowKernels<float>& { return row_kernels<float>(set); },
      emulated_row_kernels(float{}),
      [&](const RowKernels<float>& kernels, const std::string& name) {
        for (const RowNormalizer& each : kSparse) {
          for (std::size_t which = 0; which < 4; ++which) {
            for (const std::int64_t row : {5, 63, 149}) {
              check(kernels, each, which, row,
                    fmt::format("{}, normalizer {} input {} row {}", name,
                                static_cast<int>(each.kind), which, row));
            }
          }
        }
      });
}

// No matrix of all scores: scratch grows with the length.
TEST(RowKernel, ScratchGrowsWithTheLengthAlone) {
  const RowKernels<float>& kernels = row_kernels<float>(InstructionSet::kPortable);
  const auto shape = [](int tokens) {
    TopKShape of;
    of.max_queries = of.max_keys = tokens;
    of.head_dim = 64;
    of.kept = 8;
    return of;
  };
  const auto ratio = [&](auto bytes) {
    return static_cast<double>(bytes(shape(16384))) / static_cast<double>(bytes(shape(4096)));
  };
  EXPECT_LE(ratio(kernels.top_k_scratch_bytes), 4.01);
  EXPECT_LE(ratio(kernels.entmax_scratch_bytes), 4.01);
}

}  // namespace
}  // namespace birkhoff::test
