#include "data/loader/sampler.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {
namespace {

// Four rounds make a Feistel network a strong pseudorandom permutation (Luby & Rackoff 1988), but
// small domains need more.
constexpr std::uint64_t kRounds = 8;
// Domains smaller than 2^8 would mix too little for short corpora.
constexpr int kMinHalfBits = 4;

}  // namespace

Sampler::Sampler(std::uint64_t seed, std::int64_t epoch, std::int64_t n)
    : key_(noise_key(seed, static_cast<std::uint64_t>(epoch), 0, NoisePurpose::kSampleOrder)),
      n_(static_cast<std::uint64_t>(n)),
      half_bits_(kMinHalfBits) {
  require(n >= 1, "an epoch has at least one sample");
  while (half_bits_ < 32 && (std::uint64_t{1} << (2 * half_bits_)) < n_) ++half_bits_;
}

std::int64_t Sampler::at(std::int64_t place) const {
  std::int64_t sample = 0;
  read(place, place + 1, &sample);
  return sample;
}

void Sampler::read(std::int64_t begin, std::int64_t end, std::int64_t* samples) const {
  require(begin >= 0 && begin <= end && static_cast<std::uint64_t>(end) <= n_,
          "positions outside the epoch");
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  // Each round waits for the one before, but the CPU overlaps the rounds of several positions.
  constexpr std::int64_t kAtOnce = 8;
  for (; begin < end; begin += kAtOnce, samples += kAtOnce) {
    std::array<std::int64_t, kAtOnce> walking;  // indices of values not yet in [0, n)
    auto last = walking.begin() + std::min(kAtOnce, end - begin);
    std::iota(walking.begin(), last, 0);
    std::iota(samples, samples + (last - walking.begin()), begin);
    while (last != walking.begin()) {
      std::array<std::uint64_t, kAtOnce> left, right;
      const auto num_walking = static_cast<std::size_t>(last - walking.begin());
      for (std::size_t i = 0; i < num_walking; ++i) {
        const auto value = static_cast<std::uint64_t>(samples[walking[i]]);
        left[i] = value >> half_bits_;
        right[i] = value & mask;
      }
      for (std::uint64_t round = 0; round < kRounds; ++round) {
        for (std::size_t i = 0; i < num_walking; ++i) {
          const std::uint64_t mixed = philox(key_, round, right[i])[0] & mask;
          left[i] = std::exchange(right[i], left[i] ^ mixed);
        }
      }
      for (std::size_t i = 0; i < num_walking; ++i) {
        samples[walking[i]] = static_cast<std::int64_t>((left[i] << half_bits_) | right[i]);
      }
      last = std::remove_if(walking.begin(), last, [&](std::int64_t i) {
        return static_cast<std::uint64_t>(samples[i]) < n_;
      });
    }
  }
}

std::int64_t epoch_shift(std::uint64_t seed, std::int64_t epoch, std::int64_t length) {
  if (epoch == 0) return 0;
  // Layer 1, because the permutation of the same epoch uses the key of layer 0.
  const std::uint64_t key =
      noise_key(seed, static_cast<std::uint64_t>(epoch), 1, NoisePurpose::kSampleOrder);
  const auto words = philox(key, 0, 0);
  const std::uint64_t bits = (static_cast<std::uint64_t>(words[0]) << 32) | words[1];
  return static_cast<std::int64_t>(bits % static_cast<std::uint64_t>(length));
}

}  // namespace birkhoff
