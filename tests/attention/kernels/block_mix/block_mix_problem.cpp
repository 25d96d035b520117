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
  if (lengths_B.defined()) {
    other.lengths_B = lengths_B.to(device);
    other.last_weights_BHNN = last_weights_BHNN.to(device);
  }
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

MixProblem make_padded_mix_problem(const MixSizes& sizes, const std::vector<std::int64_t>& lengths,
                                   at::ScalarType dtype, bool layers, int tensors,
                                   std::uint64_t seed) {
  const std::int64_t N = sizes.blocks, b = sizes.block;
  MixProblem problem = make_mix_problem(sizes, N - 1, dtype, layers, tensors, seed);
  problem.name += " with padding";
  problem.lengths_B = at::tensor(lengths, at::kLong);
  problem.last_weights_BHNN =
      random_tensor(problem.weights_BHNN.sizes(), at::kFloat, 100 * seed + 99);
  const at::Tensor last_B1 = problem.lengths_B.unsqueeze(1), first_N = at::arange(N) * b;
  const auto clear = [](const at::Tensor& w_BHNN, const at::Tensor& columns_BN) {
    return w_BHNN.masked_fill(columns_BN.unsqueeze(1).unsqueeze(2), 0);
  };
  problem.weights_BHNN = clear(problem.weights_BHNN, first_N >= last_B1);
  problem.last_weights_BHNN = clear(problem.last_weights_BHNN, first_N + b > last_B1);
  const at::Tensor padding = (at::arange(N * b) >= last_B1).view({-1, 1, N, b, 1});
  for (at::Tensor& x : problem.x_BHNbD) x = x.masked_fill(padding, NAN);
  return problem;
}

void expect_mixes(const std::vector<at::Tensor>& results, const MixProblem& problem) {
  const at::ScalarType dtype = problem.x_BHNbD[0].scalar_type();
  const auto rounded = [&](const at::Tensor& w) { return w.to(dtype).to(at::kDouble); };
  const at::Tensor w = rounded(problem.weights_BHNN);
  const std::int64_t N = w.size(3), b = problem.x_BHNbD[0].size(3);
  const bool padded = problem.lengths_B.defined();
  const at::Tensor last_w = padded ? rounded(problem.last_weights_BHNN) : w;
  // Tokens that a sample's last block has: [B, 1, 1, b, 1].
  const at::Tensor has =
      padded ? (at::arange(b) < at::remainder(problem.lengths_B - 1, b).add(1).unsqueeze(1))
                   .view({-1, 1, 1, b, 1})
             : at::ones({1, 1, 1, b, 1}, at::kBool);
  const auto mixed = [&](const auto& of_weights, const at::Tensor& x) {
    return at::where(has, product(of_weights(w), x), product(of_weights(last_w), x));
  };
  const auto same = [](const at::Tensor& x) { return x; };
  const auto absolute = [](const at::Tensor& x) { return x.abs(); };
  const auto transposed = [](const at::Tensor& x) { return x.transpose(2, 3); };
  const auto both = [](const at::Tensor& x) { return x.transpose(2, 3).abs(); };
  ASSERT_EQ(results.size(), 1 + 2 * problem.x_BHNbD.size());
  at::Tensor d_w = at::zeros_like(padded ? at::stack({w, w}) : w), d_w_sums = d_w;
  std::int64_t terms = 0;
  for (std::size_t i = 0; i < problem.x_BHNbD.size(); ++i) {
    const at::Tensor x = problem.x_BHNbD[i].to(at::kDouble).nan_to_num(0),
                     d_y = problem.d_y_BHNbD[i].to(at::kDouble);
    EXPECT_EQ(results[1 + 2 * i].scalar_type(), dtype);
    EXPECT_EQ(results[2 + 2 * i].scalar_type(), dtype);
    expect_close(results[1 + 2 * i], mixed(same, x), mixed(absolute, x.abs()), N,
                 problem.name + ", y");
    const at::Tensor& other = problem.others_BHNbD[i];
    const at::Tensor begin = other.defined() ? other.to(at::kDouble) : at::zeros_like(d_y);
    expect_close(results[2 + 2 * i], begin + mixed(transposed, d_y),
                 begin.abs() + mixed(both, d_y.abs()), N + 1, problem.name + ", d_x");
    const at::Tensor x_t = x.flatten(3).transpose(2, 3);
    const auto of_weights = [&](const at::Tensor& d, const at::Tensor& x_of_set) {
      const auto of = [&](const at::Tensor& tokens) {
        return at::matmul(d.masked_fill(tokens.logical_not(), 0).flatten(3), x_of_set);
      };
      return padded ? at::stack({of(has), of(has.logical_not())}) : of(has);
    };
    d_w = d_w + of_weights(d_y, x_t);
    d_w_sums = d_w_sums + of_weights(d_y.abs(), x_t.abs());
    terms += x.size(3) * x.size(4);
  }
  EXPECT_EQ(results[0].scalar_type(), at::kFloat);
  expect_close(results[0], d_w.tril(problem.diagonal), d_w_sums.tril(problem.diagonal), terms,
               problem.name + ", d_w");
}

}  // namespace birkhoff::test
