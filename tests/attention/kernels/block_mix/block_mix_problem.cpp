#include "tests/attention/kernels/block_mix/block_mix_problem.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

// sum_v w_uv x_v.
at::Tensor product(const at::Tensor& w_BHNN, const at::Tensor& x_BHNbD) {
  return at::matmul(w_BHNN, x_BHNbD.flatten(3)).view(x_BHNbD.sizes());
}

// `sums`: the sums of the absolute values of the `terms` products that add up to `exact`.
void expect_close(const at::Tensor& result, const at::Tensor& exact, const at::Tensor& sums,
                  std::int64_t terms, const std::string& what) {
  ASSERT_EQ(result.sizes(), exact.sizes()) << what;
  const bool half = result.scalar_type() == at::kHalf;
  // A tensor core truncates sums of 16 products instead of rounding them.
  const double sum_error = static_cast<double>(terms / 8 + 8) * 0x1p-23;
  const double rounding = result.scalar_type() == at::kFloat ? 0 : half ? 0x1p-11 : 0x1p-8;
  const at::Tensor bound = exact.abs() * rounding + sums * sum_error + (half ? 0x1p-24 : 0);
  const at::Tensor error = (result.cpu().to(at::kDouble) - exact).abs();
  // NaN fails here too: it is not <= the bound.
  EXPECT_TRUE((error <= bound).all().item<bool>())
      << what << ": " << (error > bound).sum().item<std::int64_t>() << " of " << error.numel()
      << " numbers, worst " << (error / bound).max().item<double>() << " of the bound";
}

}  // namespace

MixProblem MixProblem::to(at::Device device) const {
  MixProblem other = *this;
  other.weights_BHNN = weights_BHNN.to(device);
  for (at::Tensor& x : other.x_BHNbD) x = x.to(device);
  for (at::Tensor& x : other.d_y_BHNbD) x = x.to(device);
  for (at::Tensor& x : other.others_BHNbD) x = x.defined() ? x.to(device) : x;
  return other;
}

MixProblem make_mix_problem(const MixSizes& sizes, std::int64_t diagonal, at::ScalarType dtype,
                            bool layers, int tensors, std::uint64_t seed) {
  const auto [B, H, N, b, D] = sizes;
  std::uint64_t next = 100 * seed;
  const auto tensor = [&]() -> at::Tensor {
    ++next;
    if (!layers) return random_tensor({B, H, N, b, D}, at::kFloat, next).to(dtype);
    return random_tensor({B, N, b, 3, H, D}, at::kFloat, next)
        .to(dtype)
        .select(3, static_cast<std::int64_t>(next % 3))
        .permute({0, 3, 1, 2, 4});
  };
  MixProblem problem;
  problem.weights_BHNN = random_tensor({B, H, N, N}, at::kFloat, ++next).tril(diagonal);
  for (int i = 0; i < tensors; ++i) {
    problem.x_BHNbD.push_back(tensor());
    problem.d_y_BHNbD.push_back(tensor());
    problem.others_BHNbD.push_back((seed + static_cast<std::uint64_t>(i)) % 3 > 0 ? tensor()
                                                                                  : at::Tensor());
  }
  problem.diagonal = diagonal;
  problem.name =
      fmt::format("seed {}: B {} H {} N {} b {} D {}, diagonal {}, {} {}", seed, B, H, N, b, D,
                  diagonal, layers ? "layers' order" : "contiguous", c10::toString(dtype));
  return problem;
}

void expect_mixes(const std::vector<at::Tensor>& results, const MixProblem& problem) {
  const at::ScalarType dtype = problem.x_BHNbD[0].scalar_type();
  const at::Tensor w = problem.weights_BHNN.to(dtype).to(at::kDouble), w_t = w.transpose(2, 3);
  const std::int64_t N = w.size(3);
  ASSERT_EQ(results.size(), 1 + 2 * problem.x_BHNbD.size());
  at::Tensor d_w = at::zeros_like(w), d_w_sums = d_w;
  std::int64_t terms = 0;
  for (std::size_t i = 0; i < problem.x_BHNbD.size(); ++i) {
    const at::Tensor x = problem.x_BHNbD[i].to(at::kDouble),
                     d_y = problem.d_y_BHNbD[i].to(at::kDouble);
    EXPECT_EQ(results[1 + 2 * i].scalar_type(), dtype);
    EXPECT_EQ(results[2 + 2 * i].scalar_type(), dtype);
    expect_close(results[1 + 2 * i], product(w, x), product(w.abs(), x.abs()), N,
                 problem.name + ", y");
    const at::Tensor& other = problem.others_BHNbD[i];
    const at::Tensor begin = other.defined() ? other.to(at::kDouble) : at::zeros_like(d_y);
    expect_close(results[2 + 2 * i], begin + product(w_t, d_y),
                 begin.abs() + product(w_t.abs(), d_y.abs()), N + 1, problem.name + ", d_x");
    const at::Tensor x_t = x.flatten(3).transpose(2, 3);
    d_w = d_w + at::matmul(d_y.flatten(3), x_t);
    d_w_sums = d_w_sums + at::matmul(d_y.flatten(3).abs(), x_t.abs());
    terms += x.size(3) * x.size(4);
  }
  EXPECT_EQ(results[0].scalar_type(), at::kFloat);
  expect_close(results[0], d_w.tril(problem.diagonal), d_w_sums.tril(problem.diagonal), terms,
               problem.name + ", d_w");
}

}  // namespace birkhoff::test
