#include "tests/attention/kernels/block_attention/block_attention_problem.h"

#include <ATen/OpMathType.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <fmt/core.h>

#include <random>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {

BlockProblem BlockProblem::to(at::ScalarType dtype, at::Device device) const {
  BlockProblem other = *this;
  other.leaves.clear();
  const auto leaf = [&](const at::Tensor& x) {
    other.leaves.push_back(x.detach().to(device, dtype).set_requires_grad(true));
    return other.leaves.back();
  };
  other.attention.q_BHNbD = leaf(attention.q_BHNbD);
  for (at::Tensor* each : {&other.attention.relative.keys_HRD, &other.attention.relative.values_HRD,
                           &other.attention.sink_H}) {
    if (each->defined()) *each = leaf(*each);
  }
  if (at::Tensor& bias_HR = other.attention.relative.bias_HR; bias_HR.defined()) {
    bias_HR = bias_HR.detach().to(device, at::toOpMathType(dtype)).set_requires_grad(true);
    other.leaves.push_back(bias_HR);
  }
  for (KeyBlocks& keys : other.attention.keys) {
    keys.k_BHNbD = leaf(keys.k_BHNbD);
    keys.v_BHNbD = leaf(keys.v_BHNbD);
    if (keys.bias_BHNbb.defined()) keys.bias_BHNbb = leaf(keys.bias_BHNbb);
    for (at::Tensor& mask : keys.mask_BHNbb) {
      if (mask.defined()) mask = mask.to(device);
    }
  }
  if (other.attention.noise) {
    NoiseKey& noise = *other.attention.noise;
    noise.step = noise.step.to(device);
    noise.sample_ids_B = noise.sample_ids_B.to(device);
  }
  other.d_out = d_out.to(device, dtype);
  return other;
}

BlockProblem make_block_problem(const BlockShape& shape, const std::vector<KeyChoice>& choices,
                                at::ScalarType dtype, double size, float dropout,
                                std::uint64_t seed) {
  const auto [B, H, N, b, D, G] = shape;
  std::uint64_t next = 100 * seed;
  // Contiguous, or in the layout of the layers inside a wider tensor, where q, k and v come from
  // one product.
  const auto tensor = [&](double factor, std::int64_t heads) {
    ++next;
    if (next % 3 == 0) {
      return (random_tensor({B, heads, N, b, D}, at::kFloat, next) * factor).to(dtype);
    }
    const at::Tensor wide =
        (random_tensor({B, N, b, 3, heads, D}, at::kFloat, next) * factor).to(dtype);
    return wide.select(3, static_cast<std::int64_t>(next % 2)).permute({0, 3, 1, 2, 4});
  };
  BlockProblem problem;
  problem.attention.q_BHNbD = tensor(size, H * G);
  for (const KeyChoice& choice : choices) {
    KeyBlocks keys;
    keys.k_BHNbD = tensor(size, H);
    keys.v_BHNbD = tensor(1, H);
    keys.window.first_offset = choice.first_offset;
    keys.window.last_offset = choice.last_offset;
    keys.window.causal = choice.causal;
    for (std::int64_t offset = keys.window.first_offset; offset <= keys.window.last_offset;
         ++offset) {
      const auto draw = [&](at::IntArrayRef sizes) {
        return random_tensor(sizes, at::kFloat, ++next) > -0.5;
      };
      at::Tensor mask;
      if (choice.mask == KeyChoice::kPairs) mask = draw({B, 1, N, b, b});
      if (choice.mask == KeyChoice::kQueries) mask = draw({1, H, N, b, 1});
      if (choice.mask == KeyChoice::kKeys) mask = draw({B, 1, N, 1, b});
      if (choice.mask == KeyChoice::kBlocks)
        mask = draw({B, 1, N, 1, 1}).expand({-1, -1, -1, b, b});
      if (choice.mask == KeyChoice::kNear) {
        const at::Tensor place = at::arange(b);
        const at::Tensor distance_bb = place.unsqueeze(1) - (place + offset * b);
        mask = (distance_bb.abs() < b + b / 2).view({1, 1, 1, b, b});
      }
      keys.mask_BHNbb.push_back(mask);
    }
    if (choice.bias) {
      keys.bias_BHNbb = random_tensor({B, next % 2 ? H : 1, N, 1, b}, at::kFloat, ++next).to(dtype);
    }
    problem.attention.keys.push_back(keys);
  }
  problem.attention.dropout = dropout;
  if (dropout > 0) {
    problem.attention.noise = NoiseKey{.seed = seed,
                                       .step = at::full({1}, 7, at::kLong),
                                       .layer = 3,
                                       .sample_ids_B = at::arange(B, at::kLong) + 1000};
  }
  problem.d_out = tensor(1, H * G);
  problem.name = fmt::format("seed {}: B {} H {} G {} N {} b {} D {}, size {}, dropout {}", seed, B,
                             H, G, N, b, D, size, dropout);
  return problem.to(dtype);
}

BlockProblem with_relative(BlockProblem problem, std::int64_t rows, std::int64_t least,
                           bool per_head, std::uint64_t seed, bool values) {
  const at::Tensor& q = problem.attention.q_BHNbD;
  const auto table = [&](std::uint64_t table_seed) {
    return random_tensor({per_head ? q.size(1) : 1, rows, q.size(4)}, q.scalar_type(), table_seed);
  };
  problem.attention.relative = {.keys_HRD = table(seed),
                                .values_HRD = values ? table(seed + 1000) : at::Tensor(),
                                .least = least};
  for (KeyBlocks& keys : problem.attention.keys) {
    keys.in_place = !problem.attention.one_softmax || &keys == &problem.attention.keys.back();
  }
  problem.name += fmt::format(", {} rows from {}{}", rows, least, values ? ", of values" : "");
  return problem.to(q.scalar_type());
}

BlockProblem with_distance_bias(BlockProblem problem, std::uint64_t seed) {
  RelativePositions& relative = problem.attention.relative;
  relative.bias_HR = random_tensor(relative.keys_HRD.sizes().slice(0, 2), at::kFloat, seed + 2000);
  problem.name += ", bias of distances";
  return problem.to(problem.attention.q_BHNbD.scalar_type());
}

BlockProblem with_sink(BlockProblem problem, std::uint64_t seed) {
  const at::Tensor& q = problem.attention.q_BHNbD;
  const double size = q.detach().abs().max().to(at::kDouble).item<double>() / 3;
  problem.attention.sink_H =
      (random_tensor({q.size(1)}, at::kFloat, seed).abs() * (size * size)).to(q.scalar_type());
  problem.name += ", sink";
  return problem.to(q.scalar_type());
}

BlockProblem random_block_problem(int seed, at::ScalarType dtype, std::int64_t most_tokens,
                                  std::int64_t most_head_dim) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto draw = [&](const std::vector<std::int64_t>& from) {
    return from[random() % from.size()];
  };
  const auto draw_at_most = [&](std::int64_t most, const std::vector<std::int64_t>& from) {
    std::vector<std::int64_t> fitting;
    for (const std::int64_t x : from) {
      if (x <= most) fitting.push_back(x);
    }
    return draw(fitting);
  };
  const BlockShape shape{draw({1, 2}), draw({1, 3}), draw({1, 2, 3}),
                         draw_at_most(most_tokens, {16, 37, 64, 65, 100, 128, 192, 256}),
                         draw_at_most(most_head_dim, {8, 32, 64, 64, 96, 128, 128, 256})};
  std::vector<KeyChoice> keys(static_cast<std::size_t>(draw({1, 2})));
  for (KeyChoice& choice : keys) {
    choice.first_offset = static_cast<int>(draw({0, 0, -1, -2}));
    choice.last_offset = std::max(choice.first_offset, static_cast<int>(draw({0, 0, 1, -1})));
    choice.causal = random() % 2;
    choice.mask = static_cast<KeyChoice::Mask>(random() % 5);
    choice.bias = choice.first_offset == 0 && choice.last_offset == 0 && random() % 2;
  }
  BlockProblem problem =
      make_block_problem(shape, keys, dtype, static_cast<double>(draw({1, 1, 3})),
                         random() % 3 == 0 ? 0.2f : 0.0f, static_cast<std::uint64_t>(seed));
  // The reference needs entries of equal width if each has its own softmax.
  const auto width = [](const KeyChoice& choice) {
    return choice.last_offset - choice.first_offset;
  };
  problem.attention.one_softmax = random() % 2 || width(keys.front()) != width(keys.back());
  return problem;
}

std::vector<at::Tensor> solve(const BlockProblem& problem, Path path) {
  const at::Tensor out = attend_in_blocks(problem.attention, path);
  std::vector<at::Tensor> result =
      torch::autograd::grad({out}, problem.leaves, {problem.d_out}, false, false, true);
  for (std::size_t i = 0; i < result.size(); ++i) {
    if (!result[i].defined()) result[i] = at::zeros_like(problem.leaves[i]);
  }
  result.insert(result.begin(), out.detach());
  return result;
}

void expect_errors_of_reference(const std::vector<at::Tensor>& kernel,
                                const BlockProblem& problem) {
  const std::vector<at::Tensor> reference = solve(problem, Path::kReference);
  const std::vector<at::Tensor> exact = solve(problem.to(at::kDouble), Path::kReference);
  const double rounding = problem.d_out.scalar_type() == at::kHalf ? 0x1p-11 : 0x1p-8;
  ASSERT_EQ(kernel.size(), exact.size());
  // Kernels take d_out . out from the rounded out. About two standard deviations of that rounding
  // are allowed in sums over all queries that a bias of distances makes cancel.
  const BlockAttention& in = problem.attention;
  const double of_bias =
      std::sqrt(3) * rounding / 2 *
      (problem.d_out.to(at::kCPU, at::kDouble) * exact[0]).norm().item<double>() /
      std::sqrt(static_cast<double>(in.q_BHNbD.size(4)));
  const at::Tensor q = in.q_BHNbD.detach().to(at::kCPU, at::kDouble);
  const double of_keys = of_bias * q.square().mean().sqrt().item<double>();
  for (std::size_t i = 0; i < exact.size(); ++i) {
    ASSERT_EQ(kernel[i].sizes(), exact[i].sizes()) << problem.name << " tensor " << i;
    double more = 0;
    if (i > 0 && in.relative.bias_HR.defined()) {
      if (problem.leaves[i - 1].is_same(in.relative.bias_HR)) more = of_bias;
      if (problem.leaves[i - 1].is_same(in.relative.keys_HRD)) more = of_keys;
    }
    EXPECT_TRUE(kernel[i].isfinite().all().item<bool>()) << problem.name << " tensor " << i;
    const auto error = [&](const at::Tensor& x) {
      return (x.cpu().to(at::kDouble) - exact[i]).abs().max().item<double>();
    };
    EXPECT_LE(error(kernel[i]),
              2 * error(reference[i]) + 2 * rounding * exact[i].abs().max().item<double>() + more)
        << problem.name << " tensor " << i << ", the reference's error is " << error(reference[i]);
  }
}

}  // namespace birkhoff::test
