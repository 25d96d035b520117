#include "data/loader/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "cluster/base/random/philox.h"

namespace birkhoff {
namespace {

std::vector<std::int64_t> order_of(std::uint64_t seed, std::int64_t epoch, std::int64_t n) {
  const Sampler order(seed, epoch, n);
  std::vector<std::int64_t> samples;
  for (std::int64_t place = 0; place < n; ++place) samples.push_back(order.at(place));
  return samples;
}

TEST(Sampler, IsABijectionForEveryCount) {
  std::vector<std::int64_t> counts = {997, 1009, 1024, 4095, 4096, 4097, 7919, 65536, 65537};
  for (std::int64_t n = 1; n <= 70; ++n) counts.push_back(n);
  for (const std::int64_t n : {255, 256, 257}) counts.push_back(n);
  for (const std::int64_t n : counts) {
    std::vector<bool> seen(static_cast<std::size_t>(n));
    for (const std::int64_t sample : order_of(7, 3, n)) {
      ASSERT_GE(sample, 0);
      ASSERT_LT(sample, n);
      ASSERT_FALSE(seen[static_cast<std::size_t>(sample)])
          << "sample " << sample << " twice of " << n;
      seen[static_cast<std::size_t>(sample)] = true;
    }
  }
}

TEST(Sampler, RangesAreThePlacesInThem) {
  const std::int64_t n = 1100;  // three of four values are mapped again
  const Sampler order(3, 1, n);
  for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{5}, n - 1, n}) {
    for (const std::int64_t end : {begin, begin + 1, begin + 8, begin + 21, n}) {
      if (end > n) continue;
      std::vector<std::int64_t> samples(static_cast<std::size_t>(end - begin), -1);
      order.read(begin, end, samples.data());
      for (std::int64_t place = begin; place < end; ++place) {
        ASSERT_EQ(samples[static_cast<std::size_t>(place - begin)], order.at(place));
      }
    }
  }
}

// The definition, one value and one word at a time.
std::int64_t by_definition(std::uint64_t seed, std::int64_t epoch, std::int64_t n,
                           std::int64_t place) {
  const std::uint64_t key =
      noise_key(seed, static_cast<std::uint64_t>(epoch), 0, NoisePurpose::kSampleOrder);
  int half_bits = 4;
  while (half_bits < 32 && (std::uint64_t{1} << (2 * half_bits)) < static_cast<std::uint64_t>(n)) {
    ++half_bits;
  }
  const std::uint64_t mask = (std::uint64_t{1} << half_bits) - 1;
  auto value = static_cast<std::uint64_t>(place);
  do {
    std::uint64_t left = value >> half_bits, right = value & mask;
    for (std::uint64_t round = 0; round < 8; ++round) {
      left = std::exchange(right, left ^ (philox(key, round, right)[0] & mask));
    }
    value = left << half_bits | right;
  } while (value >= static_cast<std::uint64_t>(n));
  return static_cast<std::int64_t>(value);
}

TEST(Sampler, IsAFeistelNetworkOfPhilox) {
  for (const std::int64_t n :
       {std::int64_t{1}, std::int64_t{9}, std::int64_t{1281167}, std::int64_t{1} << 62}) {
    const std::int64_t count = std::min<std::int64_t>(n, 100);
    std::vector<std::int64_t> samples(static_cast<std::size_t>(count));
    Sampler(5, 2, n).read(n - count, n, samples.data());
    for (std::int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(samples[static_cast<std::size_t>(i)], by_definition(5, 2, n, n - count + i)) << n;
    }
  }
}

TEST(Sampler, LargeCountsStayInRangeAndDiffer) {
  const std::int64_t n = (std::int64_t{1} << 62) + 12345;
  const Sampler order(1, 0, n);
  for (std::int64_t place = 0; place < 100; ++place) {
    EXPECT_GE(order.at(place), 0);
    EXPECT_LT(order.at(place), n);
    EXPECT_NE(order.at(place), order.at(place + 1));
  }
}

TEST(Sampler, DependsOnSeedAndEpochAlone) {
  EXPECT_EQ(order_of(1, 0, 500), order_of(1, 0, 500));
  EXPECT_NE(order_of(1, 0, 500), order_of(2, 0, 500));
  EXPECT_NE(order_of(1, 0, 500), order_of(1, 1, 500));
}

// Over many seeds, each position gets each sample equally often: a chi-square test of an n x n
// table with (n - 1)^2 degrees of freedom.
TEST(Sampler, PlacesAreUniformOverSeeds) {
  for (const std::int64_t n : {2, 3, 5, 16}) {
    const int num_seeds = 1000;
    std::vector<double> table(static_cast<std::size_t>(n * n));
    for (int seed = 0; seed < num_seeds; ++seed) {
      const auto order = order_of(static_cast<std::uint64_t>(seed), 0, n);
      for (std::int64_t place = 0; place < n; ++place) {
        ++table[static_cast<std::size_t>(place * n + order[static_cast<std::size_t>(place)])];
      }
    }
    const double expected = static_cast<double>(num_seeds) / static_cast<double>(n);
    double chi_square = 0;
    for (const double count : table)
      chi_square += (count - expected) * (count - expected) / expected;
    const double freedom = static_cast<double>((n - 1) * (n - 1));
    EXPECT_LT(chi_square, freedom + 4 * std::sqrt(2 * freedom))
        << n;  // the seeds are fixed, so the result is always the same
  }
}

// Neighbours in the order are not neighbours in the corpus: the correlation of successive samples
// is close to zero.
TEST(Sampler, NeighboursAreUncorrelated) {
  const std::int64_t n = 20000;
  const auto order = order_of(5, 0, n);
  const double mean = static_cast<double>(n - 1) / 2;
  double covariance = 0, variance = 0;
  for (std::size_t place = 0; place + 1 < order.size(); ++place) {
    const double a = static_cast<double>(order[place]) - mean,
                 b = static_cast<double>(order[place + 1]) - mean;
    covariance += a * b;
    variance += a * a;
  }
  EXPECT_LT(std::abs(covariance / variance), 4 / std::sqrt(static_cast<double>(n)));
}

// About one sample keeps its position, as in a random permutation.
TEST(Sampler, FewFixedPoints) {
  int fixed = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const auto order = order_of(seed, 0, 100);
    for (std::size_t place = 0; place < order.size(); ++place)
      fixed += order[place] == static_cast<std::int64_t>(place);
  }
  EXPECT_NEAR(fixed, 200, 4 * std::sqrt(200.0));
}

}  // namespace
}  // namespace birkhoff
