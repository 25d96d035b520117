#include "tests/attention/kernels/gathered_attention/gathered_problem.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "attention/kernels/counting_sort/counting_sort.h"
#include "attention/mechanisms/dense/dense.h"
#include "tests/attention/kernels/gathered_attention/position_lists.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {

GatheredProblem GatheredProblem::to(at::ScalarType dtype) const {
  GatheredProblem other = *this;
  GatheredAttention& in = other.attention;
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &in.relative.keys_HRD,
                        &in.relative.values_HRD, &in.sink_H}) {
    if (x->defined()) *x = x->detach().to(dtype).set_requires_grad(true);
  }
  if (at::Tensor& bias_HR = in.relative.bias_HR; bias_HR.defined()) {
    bias_HR = bias_HR.detach().to(at::toOpMathType(dtype)).set_requires_grad(true);
  }
  other.d_out_BHLD = d_out_BHLD.to(dtype);
  other.d_lse_BHL = d_lse_BHL.to(at::toOpMathType(dtype));
  return other;
}

std::vector<at::Tensor> GatheredProblem::leaves() const {
  std::vector<at::Tensor> leaves{attention.q_BHLD, attention.k_BHSD, attention.v_BHSD};
  for (const at::Tensor* x : {&attention.relative.keys_HRD, &attention.relative.values_HRD,
                              &attention.sink_H, &attention.relative.bias_HR}) {
    if (x->defined()) leaves.push_back(*x);
  }
  return leaves;
}

GatheredProblem random_problem_with_terms(int seed, int draw_index) {
  GatheredProblem problem = random_gathered_problem(seed, draw_index);
  std::mt19937 random(static_cast<unsigned>(seed) + 1000);
  const auto draw = [&](const std::vector<std::int64_t>& from) {
    return from[random() % from.size()];
  };
  auto tensor_seed = 100'000 * static_cast<std::uint64_t>(draw_index) +
                     100 * static_cast<std::uint64_t>(seed) + 50;
  const auto tensor = [&](at::IntArrayRef sizes) {
    return random_tensor(sizes, at::kFloat, ++tensor_seed);
  };
  GatheredAttention& in = problem.attention;
  const std::int64_t B = in.q_BHLD.size(0), L = in.q_BHLD.size(2), D = in.q_BHLD.size(3),
                     H = in.q_BHLD.size(1) * draw({1, 2, 3});
  const double size = in.q_BHLD.detach().abs().max().item<double>() / 3;
  in.q_BHLD = tensor({B, L, H, D}).transpose(1, 2) * size;
  problem.d_out_BHLD = tensor({B, H, L, D});
  problem.d_lse_BHL = tensor({B, H, L});
  if (random() % 4 > 0) {
    const std::int64_t heads = draw({1, H}), rows = draw({1, 3, 17, 90});
    in.relative = {.keys_HRD = tensor({heads, rows, D}),
                   .values_HRD = random() % 2 ? tensor({heads, rows, D}) : at::Tensor(),
                   .least = draw({-100, -16, -2, 0, 5})};
  }
  // Of the size of the largest logits: a sink far below them has the gradient of a single query.
  if (random() % 2) in.sink_H = tensor({H}).abs() * (size * size);
  if (in.relative.defined() && random() % 2) {
    in.relative.bias_HR = tensor(in.relative.keys_HRD.sizes().slice(0, 2)) * size;
  }
  return problem.to(at::kFloat);
}

GatheredProblem random_problem_with_dropout(int seed, int draw_index) {
  GatheredProblem problem = random_problem_with_terms(seed, draw_index);
  GatheredAttention& in = problem.attention;
  in.dropout = seed % 2 == 0 ? 0.4f : 0.1f;
  in.noise = NoiseKey{.seed = 3,
                      .step = at::full({1}, 5, at::kLong),
                      .layer = 2,
                      .sample_ids_B = at::arange(in.q_BHLD.size(0), at::kLong) * 17 + 40};
  return problem;
}

GatheredProblem random_problem_for_tensor_cores(int seed, int draw_index, std::int64_t columns) {
  GatheredProblem problem = random_problem_with_terms(seed, draw_index);
  GatheredAttention& in = problem.attention;
  in.relative = {};
  if (columns == 0) columns = in.q_BHLD.size(3);
  auto tensor_seed =
      1000 * static_cast<std::uint64_t>(seed) + 10 * static_cast<std::uint64_t>(draw_index);
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &problem.d_out_BHLD}) {
    // Numbers about as large as those that were there.
    const double size = x->detach().abs().max().item<double>() / 3;
    *x = random_tensor({x->size(0), x->size(1), x->size(2), columns}, at::kFloat, ++tensor_seed) *
         size;
  }
  return problem.to(at::kFloat);
}

GatheredProblem dense_problem(std::int64_t num_tokens) {
  const std::int64_t L = num_tokens;
  AttentionInput in;
  in.q_BHLD = random_tensor({2, 4, L, 64}, at::kFloat, 1);
  in.k_BHSD = random_tensor({2, 2, L, 64}, at::kFloat, 2);
  in.v_BHSD = random_tensor({2, 2, L, 64}, at::kFloat, 3);
  in.key_lengths_B = at::tensor({L, L - L / 3}, at::kLong);
  in.segments_q_BL = in.segments_kv_BS =
      at::stack({at::arange(L, at::kLong).div(L / 2, "floor"), at::arange(L, at::kLong).ge(7)});
  GatheredProblem problem{.attention = as_one_segment(in, /*causal=*/true, {}, at::kCPU),
                          .d_out_BHLD = random_tensor({2, 4, L, 64}, at::kFloat, 4),
                          .d_lse_BHL = at::zeros({2, 4, L}),
                          .name = "dense"};
  return problem.to(at::kFloat);
}

GatheredProblem distances_problem(std::int64_t num_queries, std::int64_t window) {
  const std::int64_t L = num_queries, S = L + 80;
  AttentionInput in;
  in.q_BHLD = random_tensor({2, 4, L, 64}, at::kFloat, 1);
  in.k_BHSD = random_tensor({2, 2, S, 64}, at::kFloat, 2);
  in.v_BHSD = random_tensor({2, 2, S, 64}, at::kFloat, 3);
  in.key_lengths_B = at::tensor({S, S - L / 3}, at::kLong);
  const at::Tensor sink_H = random_tensor({4}, at::kFloat, 5);
  GatheredProblem problem{.attention = as_one_segment(in, /*causal=*/true, sink_H, at::kCPU),
                          .d_out_BHLD = random_tensor({2, 4, L, 64}, at::kFloat, 4),
                          .d_lse_BHL = at::zeros({2, 4, L}),
                          .name = "distances"};
  problem.attention.relative = {.keys_HRD = random_tensor({4, S, 64}, at::kFloat, 6) * 0.3,
                                .values_HRD = {},
                                .bias_HR = random_tensor({4, S}, at::kFloat, 8),
                                .least = 1 - L};
  problem.attention.rows.band.most = window - 1 + L - S;
  return problem.to(at::kFloat);
}

namespace {

// Lists of the same shape that have no row twice; for some seeds the last rows are in no segment.
void list_rows_once(GatheredRows& rows, int seed, int draw_index) {
  std::mt19937 random(static_cast<unsigned>(100 * seed + draw_index));
  for (RowLists* lists : {&rows.queries, &rows.keys}) {
    const std::int64_t G = lists->ends_BHG.size(2), R = lists->num_rows,
                       unlisted = seed % 4 < 2 ? 0 : R / 5;
    if (G == 0) {
      lists->distinct = true;
      continue;
    }
    const at::Tensor segment_BHR =
        at::empty({lists->rows_BHP.size(0), lists->rows_BHP.size(1), R}, at::kInt);
    auto* segment = segment_BHR.mutable_data_ptr<std::int32_t>();
    for (std::int64_t at = 0; at < segment_BHR.numel(); ++at) {
      const bool listed = at % R < R - unlisted;
      segment[at] = listed ? static_cast<std::int32_t>(random() % static_cast<unsigned>(G)) : -1;
    }
    const RankedIndices groups = ranked_counting_sort(segment_BHR, G);
    *lists = make_permuted_lists(groups.sorted.order_BHP, groups.sorted.starts_BHR.narrow(2, 1, G),
                                 groups.ranks.position_BHP, unlisted == 0);
  }
}

// Lists of the same shape whose segments have distinct rows.
RowLists with_distinct_rows(const RowLists& lists, std::mt19937& random) {
  const std::int64_t P = lists.rows_BHP.size(2), G = lists.ends_BHG.size(2), R = lists.num_rows;
  const at::Tensor rows = lists.rows_BHP.clone(), ends = lists.ends_BHG.clone();
  std::vector<std::int32_t> all(static_cast<std::size_t>(R));
  std::iota(all.begin(), all.end(), 0);
  for (std::int64_t head = 0; head < rows.size(0) * rows.size(1); ++head) {
    auto* row = rows.mutable_data_ptr<std::int32_t>() + head * P;
    auto* end = ends.mutable_data_ptr<std::int32_t>() + head * G;
    std::int32_t first = 0, made = 0;  // of the old and the new segment
    for (std::int64_t g = 0; g < G; ++g) {
      std::shuffle(all.begin(), all.end(), random);
      const std::int32_t old_end = end[g],
                         count = std::min(old_end - first, static_cast<std::int32_t>(R));
      std::copy_n(all.begin(), count, row + made);
      first = old_end;
      end[g] = made += count;
    }
  }
  return make_row_lists(rows, ends, R, /*distinct=*/true);
}

}  // namespace

GatheredProblem random_problem_of_rows_once(int seed, int draw_index, std::int64_t columns) {
  GatheredProblem problem = random_problem_for_tensor_cores(seed, draw_index, columns);
  list_rows_once(problem.attention.rows, seed, draw_index);
  return problem;
}

GatheredProblem random_problem_of_distinct_keys(int seed, int draw_index) {
  GatheredProblem problem = seed % 3 == 0 ? random_problem_with_terms(seed, draw_index)
                                          : random_problem_with_dropout(seed, draw_index);
  GatheredRows& rows = problem.attention.rows;
  if (seed % 4 == 1) {
    list_rows_once(rows, seed, draw_index);
  } else {
    std::mt19937 random(static_cast<unsigned>(100 * seed + draw_index));
    rows.keys = with_distinct_rows(rows.keys, random);
  }
  return problem;
}

GatheredProblem random_gathered_problem(int seed, int draw_index) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto draw = [&](const std::vector<std::int64_t>& from) {
    return from[random() % from.size()];
  };
  const std::int64_t B = draw({1, 2}), H = draw({1, 2}), L = draw({1, 9, 70, 130}),
                     S = draw({L, L, 5, 150}), D = draw({1, 3, 8, 20, 32, 64, 99, 256});
  const std::int64_t G = draw({0, 1, 4, 9});
  const double size = static_cast<double>(draw({1, 1, 5, 8}));
  auto tensor_seed =
      100'000 * static_cast<std::uint64_t>(draw_index) + 100 * static_cast<std::uint64_t>(seed);
  const auto tensor = [&](std::int64_t rows, double factor) {
    const auto values = [&](at::IntArrayRef sizes) {
      return random_tensor(sizes, at::kFloat, ++tensor_seed) * factor;
    };
    switch (random() % 4) {
      case 0:
        return values({B, rows, H, D}).permute({0, 2, 1, 3});
      case 1:
        return values({B, H, D, rows}).transpose(2, 3);
      default:
        return values({B, H, rows, D});
    }
  };
  const auto lists = [&](std::int64_t num_rows) {
    const std::int64_t list_B = draw({1, B}), list_H = draw({1, H});
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(G));
    const std::int64_t longest = draw({3, 20, 80, 150});
    std::int64_t slots = draw({0, 2});  // not used
    for (std::int64_t& length : lengths) {
      length = random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % longest);
      slots += length;
    }
    const at::Tensor ends = at::zeros({list_B, list_H, G}, at::kInt),
                     rows = at::empty({list_B, list_H, slots}, at::kInt);
    for (std::int64_t head = 0; head < list_B * list_H; ++head) {
      std::shuffle(lengths.begin(), lengths.end(), random);
      std::int64_t end = 0;
      for (std::int64_t g = 0; g < G; ++g) {
        end += lengths[static_cast<std::size_t>(g)];
        ends.view({-1, G})[head][g] = end;
      }
    }
    // Ascending runs of neighbours, as windows have, or rows in any order.
    const bool runs = random() % 2;
    auto* row = rows.mutable_data_ptr<std::int32_t>();
    for (std::int64_t p = 0; p < rows.numel(); ++p) {
      row[p] = static_cast<std::int32_t>(runs && p % 50 != 0 && p % slots != 0
                                             ? (row[p - 1] + 1) % num_rows
                                             : random() % num_rows);
    }
    return make_row_lists(rows, ends, num_rows);
  };
  GatheredProblem problem;
  GatheredAttention& in = problem.attention;
  in.q_BHLD = tensor(L, size);
  in.k_BHSD = tensor(S, size);
  in.v_BHSD = tensor(S, 1);
  in.rows.queries = lists(L);
  in.rows.keys = lists(S);
  DistanceBand& band = in.rows.band;
  switch (random() % 5) {
    case 0:
      break;
    case 1:
      band.least = 0;
      break;
    case 2:
      band = {.least = -3, .most = 11};
      break;
    case 3:
      band = {.of = DistanceBand::Of::kRanks, .least = -draw({0, 5})};
      break;
    default:
      band = {.least = 1,
              .positions_q_BHL =
                  (random_tensor({1, 1, L}, at::kFloat, ++tensor_seed) * 50).to(at::kInt),
              // One of two coordinates, so not contiguous.
              .positions_k_BHS =
                  (random_tensor({B, H, S, 2}, at::kFloat, 7) * 50).to(at::kInt).select(3, 1)};
  }
  if (random() % 3 == 0) {
    in.key_lengths_B = at::full({2 * B}, S / 2, at::kLong).slice(0, 0, 2 * B, 2);
    in.key_lengths_B[0] = S;
  }
  problem.d_out_BHLD = tensor(L, 1);
  problem.d_lse_BHL = random_tensor({B, H, L}, at::kFloat, ++tensor_seed);
  problem.name = "seed " + std::to_string(seed) + " L " + std::to_string(L) + " S " +
                 std::to_string(S) + " D " + std::to_string(D) + " G " + std::to_string(G);
  return problem.to(at::kFloat);
}

GatheredProblem window_problem(std::int64_t batch, std::int64_t heads, std::int64_t num_tokens,
                               std::int64_t width) {
  const auto values = [&](std::uint64_t seed) {
    return random_tensor({batch, heads, num_tokens, 64}, at::kFloat, seed);
  };
  GatheredProblem problem;
  problem.attention = {.q_BHLD = values(1),
                       .k_BHSD = values(2),
                       .v_BHSD = values(3),
                       .rows = sliding_window_lists(num_tokens, width, true, at::kCPU)};
  problem.d_out_BHLD = values(4);
  problem.d_lse_BHL = random_tensor({batch, heads, num_tokens}, at::kFloat, 5);
  problem.name = "windows";
  return problem.to(at::kFloat);
}

at::Tensor finite_lse(const AttentionPart& part) {
  const at::Tensor none = part.sum_BHL == 0;
  return part.max_BHL + part.sum_BHL.masked_fill(none, 1).log();
}

std::vector<at::Tensor> results_of(const AttentionPart& part, const GatheredProblem& problem) {
  std::vector<at::Tensor> outputs{part.out_BHLD}, d_outputs{problem.d_out_BHLD};
  at::Tensor lse;
  if (problem.attention.merge == SlotMerge::kOneSoftmax) {
    lse = finite_lse(part);
    outputs.push_back(lse);
    d_outputs.push_back(problem.d_lse_BHL);
  } else {  // all that a mean says of its sums
    lse = part.sum_BHL.gt(0).to(part.sum_BHL.scalar_type());
  }
  std::vector<at::Tensor> results =
      torch::autograd::grad(outputs, problem.leaves(), d_outputs, /*retain_graph=*/true,
                            /*create_graph=*/false, /*allow_unused=*/true);
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) results[i] = at::zeros_like(problem.leaves()[i]);
  }
  results.insert(results.begin(), {part.out_BHLD.detach(), lse.detach()});
  return results;
}

std::vector<at::Tensor> solve(const GatheredProblem& problem, Path path) {
  return results_of(attend_gathered(problem.attention, path), problem);
}

bool expect_errors_of_the_reference(
    int seed, at::ScalarType dtype, std::int64_t queries, double product_eps,
    const std::function<std::vector<at::Tensor>(const GatheredProblem&)>& solver, SlotMerge merge,
    GatheredProblem (*random_problem)(int, int)) {
  constexpr std::int64_t kFewest = 70;
  constexpr double kUnderflow = 1e-32;
  constexpr double kFloatEps = std::numeric_limits<float>::epsilon();
  const double eps = dtype == at::kBFloat16 ? 0x1p-7 : dtype == at::kHalf ? 0x1p-10 : kFloatEps;
  const auto largest = [](const at::Tensor& x) {
    return x.detach().abs().max().to(at::kDouble).item<double>();
  };
  const auto longest = [](const at::Tensor& x) {
    return x.detach().to(at::kDouble).square().sum(-1).max().sqrt().item<double>();
  };
  const GatheredProblem shape = random_problem(seed, 0);
  const std::int64_t in_a_draw = shape.d_lse_BHL.numel();
  if (in_a_draw < kFewest) return false;
  const auto raise = [](double& most, double x) { most = std::max(most, x); };
  const std::size_t results = 2 + shape.leaves().size();
  std::vector<double> error(results), reference_error(results), scale(results), product(results);
  for (int draw = 0; draw * in_a_draw < queries; ++draw) {
    GatheredProblem problem = random_problem(seed, draw).to(dtype);
    problem.attention.merge = merge;
    const auto exact = solve(problem.to(at::kDouble), Path::kReference),
               reference = solve(problem, Path::kReference), solved = solver(problem);
    for (std::size_t i = 0; i < exact.size(); ++i) {
      EXPECT_EQ(solved[i].scalar_type(), reference[i].scalar_type());
      EXPECT_TRUE(solved[i].isfinite().all().item<bool>()) << problem.name << " result " << i;
      raise(error[i], max_difference(solved[i], exact[i]));
      raise(reference_error[i], max_difference(reference[i], exact[i]));
      raise(scale[i], largest(exact[i]));
    }
    const GatheredAttention& in = problem.attention;
    const at::Tensor& of_values = in.relative.values_HRD;  // added to v
    const double value = longest(in.v_BHSD) + (of_values.defined() ? longest(of_values) : 0);
    const double rounding = 3 * product_eps * longest(problem.d_out_BHLD) * value /
                            std::sqrt(static_cast<double>(in.q_BHLD.size(3))) / (1 - in.dropout);
    raise(product[2], rounding * largest(in.k_BHSD));
    raise(product[3], rounding * largest(in.q_BHLD));
    for (std::size_t i = 5; i < results; ++i) {
      const at::Tensor leaf = problem.leaves()[i - 2];
      if (leaf.is_same(in.relative.keys_HRD)) raise(product[i], rounding * largest(in.q_BHLD));
      if (leaf.is_same(in.relative.bias_HR)) raise(product[i], rounding);
      if (leaf.is_same(in.sink_H)) raise(product[i], rounding * std::sqrt(in.q_BHLD.size(3)));
    }
  }
  for (std::size_t i = 0; i < error.size(); ++i) {
    EXPECT_LE(error[i], 2 * reference_error[i] + 2 * (i == 1 ? kFloatEps : eps) * scale[i] +
                            product[i] + kUnderflow)
        << shape.name << " " << c10::toString(dtype) << " result " << i;
  }
  return true;
}

}  // namespace birkhoff::test
