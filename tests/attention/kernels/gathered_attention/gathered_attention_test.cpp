// Attention over gathered rows, against one softmax over the union of the keys that a query sees,
// and against the operations that the lists express. Legend: B batch, H heads, L queries, S keys, D
// head dim.
#include "attention/kernels/gathered_attention/gathered_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/common/masked_softmax.h"
#include "cluster/base/error.h"
#include "tests/attention/kernels/gathered_attention/gathered_problem.h"
#include "tests/attention/kernels/gathered_attention/position_lists.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr int kGatheredProblems = 120;
constexpr Path kBothPaths[] = {Path::kReference, Path::kFused};
std::string name_of(Path path) { return path == Path::kFused ? " fused" : " reference"; }

// From the definition: how often each query sees each key, [B, H, L, S].
at::Tensor views_of(const GatheredAttention& in) {
  const std::int64_t B = in.q_BHLD.size(0), H = in.q_BHLD.size(1), L = in.q_BHLD.size(2),
                     S = in.k_BHSD.size(2), G = in.rows.queries.ends_BHG.size(2);
  const DistanceBand& band = in.rows.band;
  const at::Tensor views = at::zeros({B, H, L, S}, at::kDouble);
  const auto list = [&](const at::Tensor& x, std::int64_t b, std::int64_t h) {
    return x.expand({B, H, -1})[b][h].contiguous();
  };
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t h = 0; h < H; ++h) {
      const at::Tensor q_rows = list(in.rows.queries.rows_BHP, b, h),
                       q_ends = list(in.rows.queries.ends_BHG, b, h),
                       k_rows = list(in.rows.keys.rows_BHP, b, h),
                       k_ends = list(in.rows.keys.ends_BHG, b, h);
      const auto number = [](const at::Tensor& x, std::int64_t i) {
        return i < 0 ? 0 : x.const_data_ptr<std::int32_t>()[i];
      };
      const auto position = [&](const at::Tensor& positions, std::int32_t row) {
        return positions.defined() ? std::int64_t{number(list(positions, b, h), row)} : row;
      };
      const std::int64_t length =
          in.key_lengths_B.defined() ? in.key_lengths_B[b].item<std::int64_t>() : S;
      for (std::int64_t g = 0; g < G; ++g) {
        for (std::int64_t i = number(q_ends, g - 1); i < number(q_ends, g); ++i) {
          const bool ranks = band.of == DistanceBand::Of::kRanks;
          const std::int64_t p_i =
              ranks ? i - number(q_ends, g - 1) : position(band.positions_q_BHL, number(q_rows, i));
          for (std::int64_t j = number(k_ends, g - 1); j < number(k_ends, g); ++j) {
            const std::int64_t p_j = ranks ? j - number(k_ends, g - 1)
                                           : position(band.positions_k_BHS, number(k_rows, j));
            if (p_i - p_j < band.least || p_i - p_j > band.most || number(k_rows, j) >= length) {
              continue;
            }
            double* row =
                views.mutable_data_ptr<double>() + ((b * H + h) * L + number(q_rows, i)) * S;
            row[number(k_rows, j)] += 1;
          }
        }
      }
    }
  }
  return views;
}

// One softmax over all keys, each counted as often as `views` says.
AttentionPart attend_views(const GatheredAttention& in, const at::Tensor& views) {
  const at::Tensor scores =
      at::matmul(in.q_BHLD, in.k_BHSD.transpose(2, 3)) / std::sqrt(in.q_BHLD.size(3));
  const at::Tensor max =
      scores.detach().masked_fill(views == 0, -1e30).amax(3).masked_fill((views == 0).all(3), 0);
  const at::Tensor e = views * (scores - max.unsqueeze(3)).masked_fill(views == 0, 0).exp();
  const at::Tensor sum = e.sum(3);
  const at::Tensor p = e / sum.masked_fill(sum == 0, 1).unsqueeze(3);
  return {at::matmul(p, in.v_BHSD), max, sum};
}

void expect_near(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                 const std::string& what, double bound = 1e-11) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double scale = std::max(1.0, b[i].abs().max().item<double>());
    EXPECT_LE(max_difference(a[i], b[i]), bound * scale) << what << " result " << i;
  }
}

GatheredRows one_segment(std::int64_t L, std::int64_t S, const DistanceBand& band) {
  const auto all = [](std::int64_t rows) {
    return make_row_lists(at::arange(rows, at::kInt).view({1, 1, -1}),
                          at::full({1, 1, 1}, rows, at::kInt), rows);
  };
  return {all(L), all(S), band};
}

GatheredAttention attention_of(std::int64_t L, std::int64_t D, at::ScalarType dtype,
                               const GatheredRows& rows) {
  const auto tensor = [&](std::uint64_t seed) {
    return random_tensor({2, 2, L, D}, dtype, seed).set_requires_grad(true);
  };
  return {.q_BHLD = tensor(1), .k_BHSD = tensor(2), .v_BHSD = tensor(3), .rows = rows};
}

// out and its gradients.
std::vector<at::Tensor> results_of(const at::Tensor& out, const GatheredAttention& in) {
  std::vector<at::Tensor> results = gradients(out, {in.q_BHLD, in.k_BHSD, in.v_BHSD});
  results.insert(results.begin(), out.detach());
  return results;
}

TEST(GatheredAttention, OneSegmentOfAllRowsIsDenseAttention) {
  for (const std::int64_t L : {1, 63, 100, 200}) {
    for (const bool causal : {false, true}) {
      DistanceBand band;
      if (causal) band.least = 0;
      const GatheredAttention in = attention_of(L, 20, at::kDouble, one_segment(L, L, band));
      const at::Tensor dense = at::scaled_dot_product_attention(in.q_BHLD, in.k_BHSD, in.v_BHSD,
                                                                std::nullopt, 0, causal);
      for (const Path path : kBothPaths) {
        expect_near(results_of(attend_gathered(in, path).out_BHLD, in), results_of(dense, in),
                    name_of(path) + " L " + std::to_string(L));
      }
    }
  }
}

TEST(GatheredAttention, IsOneSoftmaxOverTheUnionOfSlots) {
  int repeated = 0, unseeing = 0;
  for (int seed = 0; seed < kGatheredProblems; ++seed) {
    const GatheredProblem problem = random_gathered_problem(seed).to(at::kDouble);
    const at::Tensor views = views_of(problem.attention);
    repeated += (views > 1).any().item<bool>();
    unseeing += (views == 0).all(3).any().item<bool>();
    const auto expected = results_of(attend_views(problem.attention, views), problem);
    for (const Path path : kBothPaths) {
      ASSERT_EQ(choose_path(problem.attention, path), path);
      expect_near(solve(problem, path), expected, problem.name + name_of(path));
    }
  }
  EXPECT_GT(repeated, 20);
  EXPECT_GT(unseeing, 20);
}

TEST(GatheredAttention, GradientsAreThoseOfFiniteDifferences) {
  constexpr double kStep = 1e-5;
  int checked = 0;
  for (int seed = 0; checked < 12; ++seed) {
    const GatheredProblem problem = random_gathered_problem(seed).to(at::kDouble);
    if (problem.attention.q_BHLD.numel() > 3000) continue;
    ++checked;
    for (const Path path : kBothPaths) {
      const auto loss = [&] {
        const at::NoGradGuard no_grad;
        const AttentionPart part = attend_gathered(problem.attention, path);
        return ((part.out_BHLD * problem.d_out_BHLD).sum() +
                (finite_lse(part) * problem.d_lse_BHL).sum())
            .item<double>();
      };
      const auto results = solve(problem, path);
      for (std::size_t leaf = 0; leaf < 3; ++leaf) {
        const at::Tensor x = problem.leaves()[leaf].detach(),
                         direction = random_tensor(x.sizes(), at::kDouble, 5 + leaf);
        x.add_(direction, kStep);
        const double more = loss();
        x.sub_(direction, 2 * kStep);
        const double less = loss();
        x.add_(direction, kStep);
        const double slope = (results[2 + leaf] * direction).sum().item<double>();
        EXPECT_NEAR((more - less) / (2 * kStep), slope, 1e-5 * (1 + std::abs(slope)))
            << problem.name << " leaf " << leaf;
      }
    }
  }
}

class GatheredAttentionIn : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, GatheredAttentionIn, ::testing::Values(at::kFloat, at::kBFloat16));

TEST_P(GatheredAttentionIn, ErrorsAreThoseOfTheReference) {
  int checked = 0;
  for (int seed = 0; seed < kGatheredProblems; seed += 3) {
    for (const SlotMerge merge : {SlotMerge::kOneSoftmax, SlotMerge::kMean}) {
      checked += expect_errors_of_the_reference(
          seed, GetParam(), 1000, std::numeric_limits<float>::epsilon(),
          [](const GatheredProblem& problem) { return solve(problem, Path::kFused); }, merge);
    }
  }
  EXPECT_GT(checked, 30);
}

TEST_P(GatheredAttentionIn, SameBitsForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (int seed = 0; seed < kGatheredProblems; seed += 3) {
    const GatheredProblem problem = random_gathered_problem(seed).to(GetParam());
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

// A query that sees one key has p = 1 and no gradient, whatever the logit.
TEST(GatheredAttention, AQueryOfOneKeyHasNoGradient) {
  const std::int64_t L = 70;
  GatheredAttention in =
      attention_of(L, 24, at::kFloat, one_segment(L, L, {.least = 0, .most = 0}));
  const auto results = results_of(attend_gathered(in, Path::kFused).out_BHLD, in);
  EXPECT_TRUE(at::equal(results[0], in.v_BHSD.detach()));
  EXPECT_EQ(results[1].abs().max().item<float>(), 0);
  EXPECT_EQ(results[2].abs().max().item<float>(), 0);
}

// The rows of `problem` with only segments g of g % 3 == `remainder` (all: -1).
GatheredAttention some_segments(const GatheredProblem& problem, int remainder) {
  GatheredAttention in = problem.attention;
  for (RowLists* lists : {&in.rows.queries, &in.rows.keys}) {
    const std::int64_t G = lists->ends_BHG.size(2), H = lists->ends_BHG.size(1);
    std::vector<at::Tensor> rows, ends;
    for (std::int64_t head = 0; head < lists->ends_BHG.size(0) * H; ++head) {
      std::vector<std::int32_t> kept;
      std::vector<std::int32_t> kept_ends;
      for (std::int64_t g = 0, first = 0; g < G; ++g) {
        const std::int64_t end = lists->ends_BHG.view({-1, G})[head][g].item<std::int64_t>();
        for (; first < end; ++first) {
          if (g % 3 != remainder) continue;
          kept.push_back(lists->rows_BHP.flatten(0, 1)[head][first].item<std::int32_t>());
        }
        kept_ends.push_back(static_cast<std::int32_t>(kept.size()));
      }
      kept.resize(static_cast<std::size_t>(lists->rows_BHP.size(2)));
      rows.push_back(at::tensor(kept, at::kInt));
      ends.push_back(at::tensor(kept_ends, at::kInt));
    }
    *lists = make_row_lists(at::stack(rows).view_as(lists->rows_BHP),
                            at::stack(ends).view_as(lists->ends_BHG), lists->num_rows);
  }
  return in;
}

TEST(GatheredAttention, PartsMergeInAnyGrouping) {
  for (int seed = 0; seed < kGatheredProblems; seed += 12) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const GatheredProblem problem = random_gathered_problem(seed).to(dtype);
      const double bound = dtype == at::kDouble ? 1e-11 : dtype == at::kFloat ? 3e-5 : 6e-2;
      for (const Path path : kBothPaths) {
        const auto whole = solve(problem, path);
        std::vector<AttentionPart> parts;
        for (const int remainder : {0, 1, 2}) {
          parts.push_back(attend_gathered(some_segments(problem, remainder), path));
        }
        const AttentionPart left = merge_parts({merge_parts({parts[0], parts[1]}), parts[2]}),
                            right = merge_parts({parts[0], merge_parts({parts[2], parts[1]})});
        for (const AttentionPart& merged : {merge_parts(parts), left, right}) {
          expect_near(results_of(merged, problem), whole, problem.name, bound);
        }
      }
    }
  }
}

TEST(GatheredAttention, SlidingWindowsAreLists) {
  for (const std::int64_t L : {5, 64, 150}) {
    for (const std::int64_t width : {1, 7, 64, 100, 1000}) {
      for (const bool causal : {false, true}) {
        const GatheredAttention in =
            attention_of(L, 12, at::kDouble, sliding_window_lists(L, width, causal, at::kCPU));
        const Blocks blocks(in.q_BHLD, {}, 16, causal);
        const at::Tensor expected = blocks.from_blocks(
            attend_in_blocks({.q_BHNbD = blocks.to_blocks(in.q_BHLD, 2),
                              .keys = {nearest_keys(blocks, in.k_BHSD, in.v_BHSD, width, causal)},
                              .noise = {}},
                             Path::kFused),
            2);
        for (const Path path : kBothPaths) {
          expect_near(results_of(attend_gathered(in, path).out_BHLD, in), results_of(expected, in),
                      "L " + std::to_string(L) + " width " + std::to_string(width));
        }
      }
    }
  }
}

// A query's own window and every `stride`-th key before it, merged by log-sum-exp.
TEST(GatheredAttention, StridedAttentionIsTwoParts) {
  for (const std::int64_t L : {10, 64, 150}) {
    for (const std::int64_t stride : {1, 8, 13, 200}) {
      GatheredAttention in =
          attention_of(L, 12, at::kDouble, sliding_window_lists(L, stride, true, at::kCPU));
      const at::Tensor distance = at::arange(L).unsqueeze(1) - at::arange(L);
      const at::Tensor visible = at::logical_and(
          distance >= 0, at::logical_or(distance < stride, distance.remainder(stride) == 0));
      const at::Tensor scores =
          at::matmul(in.q_BHLD, in.k_BHSD.transpose(2, 3)) / std::sqrt(in.q_BHLD.size(3));
      const auto expected = results_of(at::matmul(masked_softmax(scores, visible), in.v_BHSD), in);
      for (const Path path : kBothPaths) {
        GatheredAttention summaries = in;
        summaries.rows = strided_lists(L, stride, at::kCPU);
        const AttentionPart merged =
            merge_parts({attend_gathered(in, path), attend_gathered(summaries, path)});
        expect_near(results_of(merged.out_BHLD, in), expected,
                    "L " + std::to_string(L) + " stride " + std::to_string(stride));
      }
    }
  }
}

TEST(GatheredAttention, ListedBlocksAreLists) {
  constexpr std::int64_t kBlock = 16;
  for (const std::int64_t L : {16, 64, 150}) {
    for (const bool causal : {false, true}) {
      std::vector<std::vector<std::int64_t>> keys_of;
      for (std::int64_t n = 0; n * kBlock < L; ++n) {
        keys_of.emplace_back();
        if (!causal && (n + 1) * kBlock < L) keys_of.back().push_back(n + 1);
        if (n > 0) keys_of.back().push_back(n - 1);
        keys_of.back().push_back(n);
      }
      const GatheredAttention in =
          attention_of(L, 12, at::kDouble, listed_blocks(L, kBlock, keys_of, causal, at::kCPU));
      const Blocks blocks(in.q_BHLD, {}, kBlock, causal);
      const at::Tensor expected = blocks.from_blocks(
          attend_in_blocks(
              {.q_BHNbD = blocks.to_blocks(in.q_BHLD, 2),
               .keys = {neighbouring_keys(blocks, in.k_BHSD, in.v_BHSD, 1, !causal, causal)},
               .noise = {}},
              Path::kFused),
          2);
      for (const Path path : kBothPaths) {
        expect_near(results_of(attend_gathered(in, path).out_BHLD, in), results_of(expected, in),
                    "L " + std::to_string(L));
      }
    }
  }
}

// NaN reaches the queries that see it, through any of their slots, and no others, whose bits it
// does not change. result: 0 out, 1 log-sum-exp, 2.. gradients of q, k, v.
TEST(GatheredAttention, NaNStaysWithQueriesThatSeeIt) {
  int reached = 0;
  for (int seed = 0; seed < 60; seed += 2) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const GatheredProblem problem = random_gathered_problem(seed).to(dtype);
      const at::Tensor sees = views_of(problem.attention)[0][0] > 0;
      const std::int64_t L = sees.size(0), S = sees.size(1);
      for (const int which : {0, 1, 2, 3}) {  // q, k, v, d_out
        const std::int64_t row = which == 0 || which == 3 ? L / 2 : S / 2;
        const auto solve_with = [&](double number) {
          GatheredProblem changed = problem;
          at::Tensor* x[] = {&changed.attention.q_BHLD, &changed.attention.k_BHSD,
                             &changed.attention.v_BHSD, &changed.d_out_BHLD};
          *x[which] = x[which]->detach().clone();
          (*x[which])[0][0][row][0] = number;
          if (which < 3) x[which]->set_requires_grad(true);
          return solve(changed, Path::kFused);
        };
        const auto nan = solve_with(NAN), finite = solve_with(0);
        at::Tensor queries = at::zeros({L}, at::kBool);
        if (which == 0 || which == 3) {
          queries[row] = sees[row].any();
        } else {
          queries = sees.select(1, row);
        }
        reached += queries.any().item<bool>();
        const at::Tensor keys = at::logical_and(sees, queries.unsqueeze(1)).any(0),
                         no_query = at::zeros_like(queries), no_key = at::zeros_like(keys);
        const std::vector<at::Tensor> expected{which == 3 ? no_query : queries,
                                               which < 2 ? queries : no_query, queries, keys,
                                               which == 2 ? no_key : keys};
        for (std::size_t i = 0; i < nan.size(); ++i) {
          const std::string what = problem.name + " " + c10::toString(dtype) + " tensor " +
                                   std::to_string(which) + " result " + std::to_string(i);
          const at::Tensor hole = nan[i].isnan();
          at::Tensor rows = hole[0][0];
          EXPECT_EQ(hole.sum().item<std::int64_t>(), rows.sum().item<std::int64_t>())
              << what << ": other heads or samples";
          // A value's NaN goes to its own number of the outputs only.
          if (which == 2 && i == 0) {
            EXPECT_FALSE(rows.narrow(1, 1, rows.size(1) - 1).any().item<bool>()) << what;
          }
          if (i != 1) rows = rows.any(1);
          EXPECT_TRUE(at::equal(rows, expected[i])) << what << rows << expected[i];
          EXPECT_TRUE(at::equal(nan[i].masked_fill(hole, 0), finite[i].masked_fill(hole, 0)))
              << what;
        }
      }
    }
  }
  EXPECT_GT(reached, 100);
}

template <typename F>
void expect_error(const F& f, const std::string& text) {
  try {
    f();
    ADD_FAILURE() << "no error: " << text;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

// Bounds beyond all distances are none: padding stays hidden.
TEST(GatheredAttention, PaddingIsHiddenFromAnyBand) {
  GatheredProblem problem = random_gathered_problem(0).to(at::kDouble);
  GatheredAttention& in = problem.attention;
  in.key_lengths_B = at::full({in.k_BHSD.size(0)}, in.k_BHSD.size(2) / 2, at::kLong);
  in.rows.band = {.least = std::numeric_limits<std::int64_t>::min(),
                  .most = std::numeric_limits<std::int64_t>::max()};
  const auto fused = solve(problem, Path::kFused), reference = solve(problem, Path::kReference);
  for (std::size_t i = 0; i < fused.size(); ++i) {
    EXPECT_LT((fused[i] - reference[i]).abs().max().item<double>(), 1e-11) << i;
  }
}

TEST(GatheredAttention, RefusesWhatDoesNotFit) {
  const auto list = [](const std::vector<std::int32_t>& numbers) {
    return at::tensor(numbers, at::kInt).view({1, 1, -1});
  };
  expect_error(
      [&] {
        make_row_lists(list({0, 4}), list({2}), 4);
      },
      "slot 1 of list 0 has row 4, which must be in [0, 4)");
  expect_error([&] { make_row_lists(list({-1}), list({1}), 4); }, "row -1");
  expect_error(
      [&] {
        make_row_lists(list({0, 1, 2}), list({2, 1}), 4);
      },
      "segment 1 of list 0 ends at 1, which must be in [2, 3]");
  expect_error([&] { make_row_lists(list({0}), list({2}), 4); }, "ends at 2");
  EXPECT_TRUE(make_row_lists(list({0, 1, 1, 2}), list({2, 4}), 3, /*distinct=*/true).distinct);
  expect_error(
      [&] {
        make_row_lists(list({0, 1, 1, 2}), list({4}), 3, /*distinct=*/true);
      },
      "row 1 is twice in a segment of list 0");
  expect_error([&] { make_row_lists(list({0}).to(at::kLong), list({1}), 4); }, "must be int32");
  expect_error([&] { make_row_lists(list({0}).flatten(), list({1}), 4); },
               "rows must be [B, H, P]");
  // Slots after the last end may hold anything.
  EXPECT_EQ(make_row_lists(list({3, 99}), list({1}), 4).starts_BHR[0][0][4].item<int>(), 1);

  const GatheredAttention good = attention_of(9, 4, at::kFloat, one_segment(9, 9, {}));
  attend_gathered(good, Path::kFused);
  const auto expect_refused = [&](const auto& change, const std::string& text) {
    GatheredAttention bad = good;
    change(bad);
    for (const Path path : kBothPaths) expect_error([&] { attend_gathered(bad, path); }, text);
  };
  expect_refused([](auto& in) { in.q_BHLD = in.q_BHLD.to(at::kDouble); }, "one dtype");
  expect_refused([](auto& in) { in.q_BHLD = in.q_BHLD.narrow(3, 0, 3); }, "q must be [B, H, L, D]");
  expect_refused([](auto& in) { in.q_BHLD = in.q_BHLD.narrow(2, 0, 8); }, "these queries and keys");
  expect_refused([](auto& in) { in.rows.keys = {}; }, "make_row_lists");
  expect_refused(
      [&](auto& in) {
        in.rows.keys = make_row_lists(list({0}), list({0, 1}), 9);
      },
      "the same number of segments");
  expect_refused(
      [&](auto& in) {
        in.rows.band.positions_q_BHL = at::zeros({1, 1, 9});
      },
      "positions");
  expect_refused([&](auto& in) { in.key_lengths_B = at::ones({1}, at::kLong); }, "key lengths");
}

}  // namespace
}  // namespace birkhoff::test
