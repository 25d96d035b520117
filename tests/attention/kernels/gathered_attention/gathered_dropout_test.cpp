// Dropout of attention over gathered rows: against loops that draw each factor by its element
// number. Legend: B batch, H heads, L queries, S keys, D head dim.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cluster/base/error.h"
#include "tests/attention/kernels/gathered_attention/gathered_problem.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr Path kDropoutPaths[] = {Path::kReference, Path::kFused};
constexpr SlotMerge kBothMerges[] = {SlotMerge::kOneSoftmax, SlotMerge::kMean};

// A key that a slot sees.
struct Seen {
  std::int64_t key, distance;
  double logit, factor;
};

// The definition for one query head of one sample, in fp64.
struct DropoutDefinition {
  const GatheredAttention& in;
  std::int64_t b, h;
  std::int64_t H = in.q_BHLD.size(1), key_heads = in.k_BHSD.size(1), L = in.q_BHLD.size(2),
               D = in.q_BHLD.size(3), key_head = h / (H / key_heads);
  at::Tensor q = in.q_BHLD[b][h].detach().contiguous(),
             k = in.k_BHSD[b][key_head].detach().contiguous(),
             v = in.v_BHSD[b][key_head].detach().contiguous();

  std::vector<std::int32_t> numbers(const at::Tensor& x) const {
    const at::Tensor own = x.expand({in.q_BHLD.size(0), key_heads, -1})[b][key_head].contiguous();
    const auto* data = own.const_data_ptr<std::int32_t>();
    return {data, data + own.numel()};
  }
  static const double* row(const at::Tensor& x, std::int64_t i) {
    return x.const_data_ptr<double>() + i * x.size(1);
  }
  // The row of a table for the distance of a key from its query.
  const double* vector_of(const at::Tensor& table_HRD, std::int64_t distance) const {
    const std::int64_t R = table_HRD.size(1);
    const std::int64_t r = std::clamp<std::int64_t>(distance - in.relative.least, 0, R - 1);
    return table_HRD.const_data_ptr<double>() +
           ((table_HRD.size(0) == 1 ? 0 : h) * R + r) * table_HRD.size(2);
  }
  double factor(std::int64_t slot, std::int64_t rank) const {
    const NoiseKey& noise = *in.noise;
    const auto element =
        static_cast<std::uint64_t>((slot * H + h) * (std::int64_t{1} << 31) + rank);
    const std::uint64_t key =
        noise_key(noise.seed, static_cast<std::uint64_t>(noise.step.item<std::int64_t>()),
                  noise.layer, NoisePurpose::kAttentionDropout);
    const auto words = philox(
        key, static_cast<std::uint64_t>(noise.sample_ids_B[b].item<std::int64_t>()), element / 4);
    return uniform_from_bits(words[element % 4]) > in.dropout ? 1 / (1 - in.dropout) : 0;
  }

  // For each query, what each of its slots sees.
  std::vector<std::vector<std::vector<Seen>>> slots() const {
    const std::vector<std::int32_t> q_rows = numbers(in.rows.queries.rows_BHP),
                                    q_ends = numbers(in.rows.queries.ends_BHG),
                                    k_rows = numbers(in.rows.keys.rows_BHP),
                                    k_ends = numbers(in.rows.keys.ends_BHG);
    const DistanceBand& band = in.rows.band;
    const auto position = [&](const at::Tensor& positions, std::int64_t row, std::int64_t rank) {
      if (band.of == DistanceBand::Of::kRanks) return rank;
      return positions.defined() ? std::int64_t{numbers(positions)[static_cast<std::size_t>(row)]}
                                 : row;
    };
    const std::int64_t length =
        in.key_lengths_B.defined() ? in.key_lengths_B[b].item<std::int64_t>() : in.k_BHSD.size(2);
    std::vector<std::vector<std::vector<Seen>>> of_queries(static_cast<std::size_t>(L));
    std::int32_t q_start = 0, k_start = 0;
    for (std::size_t g = 0; g < q_ends.size(); q_start = q_ends[g], k_start = k_ends[g], ++g) {
      for (std::int32_t i = q_start; i < q_ends[g]; ++i) {
        const std::int64_t query = q_rows[static_cast<std::size_t>(i)],
                           p_i = position(band.positions_q_BHL, query, i - q_start);
        auto& seen = of_queries[static_cast<std::size_t>(query)].emplace_back();
        for (std::int32_t j = k_start; j < k_ends[g]; ++j) {
          const std::int64_t key = k_rows[static_cast<std::size_t>(j)],
                             p_j = position(band.positions_k_BHS, key, j - k_start);
          if (p_i - p_j < band.least || p_i - p_j > band.most || key >= length) continue;
          double product = in.relative.bias_HR.defined()
                               ? *vector_of(in.relative.bias_HR.unsqueeze(2), key - query)
                               : 0;
          for (std::int64_t d = 0; d < D; ++d) {
            const double a =
                in.relative.defined() ? vector_of(in.relative.keys_HRD, key - query)[d] : 0;
            product += row(q, query)[d] * (row(k, key)[d] + a);
          }
          seen.push_back({key, key - query, product / std::sqrt(static_cast<double>(D)),
                          factor(i, j - k_start)});
        }
      }
    }
    return of_queries;
  }

  // Adds `share` times the output of one softmax.
  void add(const std::vector<Seen>& seen, double share, double* out) const {
    double max = in.sink_H.defined() ? in.sink_H[h].item<double>()
                                     : -std::numeric_limits<double>::infinity();
    const double sink = max;
    for (const Seen& each : seen) max = std::max(max, each.logit);
    double sum = std::exp(sink - max);
    for (const Seen& each : seen) sum += std::exp(each.logit - max);
    for (const Seen& each : seen) {
      const double p = share * each.factor * std::exp(each.logit - max) / sum;
      for (std::int64_t d = 0; d < D; ++d) {
        const double of_table = in.relative.values_HRD.defined()
                                    ? vector_of(in.relative.values_HRD, each.distance)[d]
                                    : 0;
        out[d] += p * (row(v, each.key)[d] + of_table);
      }
    }
  }

  at::Tensor out() const {
    at::Tensor result = at::zeros({L, D}, at::kDouble);
    const auto of_queries = slots();
    for (std::int64_t i = 0; i < L; ++i) {
      double* out = result.mutable_data_ptr<double>() + i * D;
      std::vector<Seen> all;
      double seeing = 0;
      for (const auto& seen : of_queries[static_cast<std::size_t>(i)]) {
        all.insert(all.end(), seen.begin(), seen.end());
        seeing += !seen.empty();
      }
      if (all.empty()) continue;
      if (in.merge == SlotMerge::kOneSoftmax) {
        add(all, 1, out);
        continue;
      }
      for (const auto& seen : of_queries[static_cast<std::size_t>(i)]) {
        if (!seen.empty()) add(seen, 1 / seeing, out);
      }
    }
    return result;
  }
};

TEST(GatheredDropout, DrawsEachFactorByItsElement) {
  int checked = 0;
  for (int seed = 0; checked < 24; ++seed) {
    GatheredProblem problem = random_problem_with_dropout(seed).to(at::kDouble);
    GatheredAttention& in = problem.attention;
    if (in.q_BHLD.numel() > 20'000) continue;
    ++checked;
    for (const SlotMerge merge : kBothMerges) {
      in.merge = merge;
      const at::Tensor reference = attend_gathered(in, Path::kReference).out_BHLD,
                       fused = attend_gathered(in, Path::kFused).out_BHLD;
      ASSERT_EQ(choose_path(in, Path::kFused), Path::kFused);
      for (std::int64_t b = 0; b < in.q_BHLD.size(0); ++b) {
        for (std::int64_t h = 0; h < in.q_BHLD.size(1); ++h) {
          const at::Tensor expected = DropoutDefinition{in, b, h}.out();
          const double bound = 1e-11 * std::max(1.0, expected.abs().max().item<double>());
          EXPECT_LE(max_difference(reference[b][h], expected), bound) << problem.name;
          EXPECT_LE(max_difference(fused[b][h], expected), bound) << problem.name;
        }
      }
    }
  }
}

TEST(GatheredDropout, ResultsInFp64AreThoseOfTheReference) {
  for (int seed = 0; seed < 60; ++seed) {
    GatheredProblem problem = random_problem_with_dropout(seed).to(at::kDouble);
    for (const SlotMerge merge : kBothMerges) {
      problem.attention.merge = merge;
      const auto expected = solve(problem, Path::kReference), found = solve(problem, Path::kFused);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_LE(max_difference(found[i], expected[i]),
                  1e-11 * std::max(1.0, expected[i].abs().max().item<double>()))
            << problem.name << " result " << i;
      }
    }
  }
}

class GatheredDropoutIn : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, GatheredDropoutIn, ::testing::Values(at::kFloat, at::kBFloat16));

TEST_P(GatheredDropoutIn, ErrorsAreThoseOfTheReference) {
  int checked = 0;
  for (int seed = 0; seed < 60; seed += 2) {
    for (const SlotMerge merge : kBothMerges) {
      checked += expect_errors_of_the_reference(
          seed, GetParam(), 1000, std::numeric_limits<float>::epsilon(),
          [](const GatheredProblem& problem) { return solve(problem, Path::kFused); }, merge,
          random_problem_with_dropout);
    }
  }
  EXPECT_GT(checked, 15);
}

TEST(GatheredDropout, GradientsAreThoseOfFiniteDifferences) {
  constexpr double kStep = 1e-5;
  int checked = 0;
  for (int seed = 0; checked < 8; ++seed) {
    GatheredProblem problem = random_problem_with_dropout(seed).to(at::kDouble);
    if (problem.attention.q_BHLD.numel() > 3000) continue;
    ++checked;
    problem.attention.merge = kBothMerges[seed % 2];
    for (const Path path : kDropoutPaths) {
      const auto loss = [&] {
        const at::NoGradGuard no_grad;
        return (attend_gathered(problem.attention, path).out_BHLD * problem.d_out_BHLD)
            .sum()
            .item<double>();
      };
      problem.d_lse_BHL.zero_();
      const auto results = solve(problem, path);
      for (std::size_t leaf = 0; leaf < problem.leaves().size(); ++leaf) {
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

TEST_P(GatheredDropoutIn, SameBitsForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (int seed = 0; seed < 30; seed += 3) {
    const GatheredProblem problem = random_problem_with_dropout(seed).to(GetParam());
    at::set_num_threads(1);
    const auto one = solve(problem, Path::kFused);
    for (const int more : {2, 3}) {
      at::set_num_threads(more);
      const auto other = solve(problem, Path::kFused);
      for (std::size_t i = 0; i < one.size(); ++i) {
        EXPECT_TRUE(at::equal(one[i], other[i])) << problem.name << " threads " << more;
      }
    }
  }
  at::set_num_threads(threads);
}

// The problem of one sample alone.
GatheredProblem sample_of(const GatheredProblem& problem, std::int64_t b) {
  GatheredProblem part = problem;
  const auto cut = [&](const at::Tensor& x) {
    return x.defined() && x.size(0) > 1 ? x.narrow(0, b, 1) : x;
  };
  GatheredAttention& in = part.attention;
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD}) {
    *x = cut(x->detach()).set_requires_grad(true);
  }
  for (at::Tensor* x :
       {&in.rows.band.positions_q_BHL, &in.rows.band.positions_k_BHS, &in.key_lengths_B,
        &in.noise->sample_ids_B, &part.d_out_BHLD, &part.d_lse_BHL}) {
    *x = cut(*x);
  }
  for (RowLists* lists : {&in.rows.queries, &in.rows.keys}) {
    *lists = make_row_lists(cut(lists->rows_BHP), cut(lists->ends_BHG), lists->num_rows);
  }
  return part;
}

// Segments of the samples differ in length.
TEST(GatheredDropout, ASampleAloneHasTheSameBits) {
  int checked = 0;
  for (int seed = 0; seed < 60; ++seed) {
    GatheredProblem problem = random_problem_with_dropout(seed);
    const std::int64_t B = problem.attention.q_BHLD.size(0);
    if (B == 1) continue;
    ++checked;
    problem.attention.merge = kBothMerges[seed % 2];
    const auto whole = solve(problem, Path::kFused);
    for (std::int64_t b = 0; b < B; ++b) {
      const auto alone = solve(sample_of(problem, b), Path::kFused);
      for (std::size_t i = 0; i < 5; ++i) {  // those of tables and sinks are sums over the batch
        EXPECT_TRUE(at::equal(alone[i], whole[i].narrow(0, b, 1))) << problem.name << " " << i;
      }
    }
  }
  EXPECT_GT(checked, 10);
}

// Equal probabilities and values of 1: an output is the share that is kept, times 1 / (1 - p).
TEST(GatheredDropout, KeepsTheExpectedShareInEveryStream) {
  constexpr std::int64_t B = 2, H = 3, L = 70, S = 300;
  constexpr float kDropped = 0.3f;
  const auto all = [](std::int64_t rows) {
    return make_row_lists(at::arange(rows, at::kInt).view({1, 1, -1}),
                          at::full({1, 1, 1}, rows, at::kInt), rows);
  };
  const auto attend = [&](std::int64_t step, std::uint32_t layer) {
    GatheredAttention in;
    in.q_BHLD = at::zeros({B, H, L, 4});
    in.k_BHSD = in.v_BHSD = at::ones({B, H, S, 4});
    in.rows = {all(L), all(S), {}};
    in.dropout = kDropped;
    in.noise = NoiseKey{.seed = 1,
                        .step = at::full({1}, step, at::kLong),
                        .layer = layer,
                        .sample_ids_B = at::tensor({8, 9}, at::kLong)};
    return attend_gathered(in, Path::kFused).out_BHLD.select(3, 0).to(at::kDouble);
  };
  const at::Tensor share_BHL = attend(4, 2) * (1 - kDropped);
  const double sigma = std::sqrt(kDropped * (1 - kDropped) / S);
  EXPECT_NEAR(share_BHL.mean().item<double>(), 1 - kDropped, 5 * sigma / std::sqrt(B * H * L));
  // The spread of shares is that of independent draws.
  EXPECT_NEAR(share_BHL.std().item<double>() / sigma, 1, 5 / std::sqrt(2.0 * B * H * L));
  for (const at::Tensor& other : {attend(5, 2), attend(4, 3)}) {
    EXPECT_FALSE(at::equal(other * (1 - kDropped), share_BHL));
  }
  EXPECT_FALSE(at::equal(share_BHL[0][0], share_BHL[0][1]));
  EXPECT_FALSE(at::equal(share_BHL[0], share_BHL[1]));
}

TEST(GatheredDropout, RefusesNoiseThatDoesNotFit) {
  const auto expect_refused = [](const auto& change, const std::string& text) {
    GatheredAttention in = random_problem_with_dropout(0).attention;
    change(in);
    for (const Path path : kDropoutPaths) {
      try {
        attend_gathered(in, path);
        ADD_FAILURE() << "no error: " << text;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      }
    }
  };
  expect_refused([](auto& in) { in.dropout = 1; }, "dropout must be in [0, 1)");
  expect_refused([](auto& in) { in.noise->sample_ids_B = at::arange(9); }, "for each sample");
}

}  // namespace
}  // namespace birkhoff::test
