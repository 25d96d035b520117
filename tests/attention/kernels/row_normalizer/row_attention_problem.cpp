#include "tests/attention/kernels/row_normalizer/row_attention_problem.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <fmt/core.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {

RowAttentionProblem RowAttentionProblem::to(at::ScalarType dtype) const {
  RowAttentionProblem other = *this;
  for (at::Tensor* x : {&other.attention.q_BHLD, &other.attention.k_BHSD, &other.attention.v_BHSD,
                        &other.d_out_BHLD}) {
    *x = x->to(dtype);
  }
  at::Tensor& terms = other.attention.distance_terms_BHLS;
  if (terms.defined()) terms = terms.to(at::toOpMathType(dtype));
  return other;
}

RowAttentionProblem random_rows(const RowAttentionSize& size, const RowNormalizer& normalizer,
                                at::ScalarType dtype) {
  constexpr std::int64_t B = 2, H = 2;
  const auto rows = [&](std::int64_t count, std::uint64_t seed) {
    return random_tensor({B, count, H, size.head_dim}, dtype, seed).transpose(1, 2);
  };
  const std::int64_t L = size.queries, S = size.keys;
  const at::Tensor query_L = at::arange(L, at::kInt), all_L = at::full({L}, S, at::kInt);
  at::Tensor first_L = at::zeros({L}, at::kInt), end_L = all_L.clone();
  if (size.causal) {
    end_L = query_L + (S - L + 1);
    first_L = at::where(query_L >= L / 3, L / 3, 0).to(at::kInt);
  } else {
    end_L.sub_(S / 7);
  }
  if (L > 8) end_L[7] = first_L[7];
  const at::Tensor whole_L = size.causal ? query_L + (S - L + 1) : all_L;
  at::Tensor terms_BHLS;
  if (size.distances) {
    // No pair has the distances before the first key: no kernel may use their terms.
    const at::Tensor unused_LS = at::arange(S) < L - 1 - query_L.unsqueeze(1);
    terms_BHLS =
        random_tensor({B, H, L, S}, at::toOpMathType(dtype), 5).masked_fill(unused_LS, NAN);
  }
  return {{.q_BHLD = rows(L, 1),
           .k_BHSD = rows(S, 2),
           .v_BHSD = rows(S, 3),
           .first_BL = at::stack({at::zeros({L}, at::kInt), first_L}),
           .end_BL = at::stack({whole_L, end_L}),
           .normalizer = normalizer,
           .dropout = 0,
           .noise = {},
           .distance_terms_BHLS = terms_BHLS},
          rows(L, 4)};
}

namespace {

// From the terms of distances to those of pairs of queries and keys.
at::Tensor of_pairs(const at::Tensor& terms_BHLS) {
  const std::int64_t L = terms_BHLS.size(2), S = terms_BHLS.size(3);
  const at::Tensor position_L1 = at::arange(S - L, S).unsqueeze(1),
                   distance_LS = (position_L1 - at::arange(S)).clamp_min(0);
  return terms_BHLS.gather(3, (S - 1 - distance_LS).expand(terms_BHLS.sizes()));
}

}  // namespace

std::vector<at::Tensor> solve_by_reference(const RowAttentionProblem& problem) {
  const RowAttention& in = problem.attention;
  const auto leaf = [](const at::Tensor& x) { return x.detach().set_requires_grad(true); };
  const at::Tensor q = leaf(in.q_BHLD), k = leaf(in.k_BHSD), v = leaf(in.v_BHSD);
  std::vector<at::Tensor> leaves{q, k, v};
  RowNormalizer normalizer = in.normalizer;
  if (normalizer.alpha_H.defined()) {
    normalizer.alpha_H = leaf(normalizer.alpha_H);
    leaves.push_back(normalizer.alpha_H);
  }
  const auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor key_S = at::arange(k.size(2), in.first_BL.options()),
                   mask_B1LS = at::logical_and(key_S >= in.first_BL.unsqueeze(2),
                                               key_S < in.end_BL.unsqueeze(2))
                                   .unsqueeze(1);
  at::Tensor products_BHLS = at::matmul(q.to(wide), k.to(wide).transpose(2, 3));
  if (in.distance_terms_BHLS.defined()) {
    leaves.push_back(leaf(in.distance_terms_BHLS));
    products_BHLS = products_BHLS + of_pairs(leaves.back());
  }
  const at::Tensor scores_BHLS = products_BHLS / std::sqrt(static_cast<double>(q.size(3))),
                   p_BHLS = normalize_rows(normalizer, scores_BHLS, mask_B1LS, {}),
                   out = at::matmul(p_BHLS.to(v.scalar_type()), v);
  std::vector<at::Tensor> results{out.detach()};
  for (const at::Tensor& d : torch::autograd::grad({out}, leaves, {problem.d_out_BHLD})) {
    results.push_back(d);
  }
  return results;
}

void expect_errors_of_the_reference(
    const RowAttentionProblem& problem,
    const std::function<std::vector<at::Tensor>(const RowAttentionProblem&)>& solve,
    const std::string& name) {
  const std::vector<at::Tensor> kernel = solve(problem), reference = solve_by_reference(problem),
                                exact = solve_by_reference(problem.to(at::kDouble));
  ASSERT_EQ(kernel.size(), exact.size()) << name;
  for (std::size_t i = 0; i < kernel.size(); ++i) {
    expect_as_exact(kernel[i], reference[i], exact[i],
                    fmt::format("{}, queries {}, keys {}, D {}, result {}", name,
                                problem.attention.q_BHLD.size(2), problem.attention.k_BHSD.size(2),
                                problem.attention.q_BHLD.size(3), i));
  }
}

}  // namespace birkhoff::test
