#include "data/order.h"

#include "cluster/base/error.h"
#include "cluster/base/philox.h"

namespace birkhoff {
namespace {

// More than the four that make a Feistel network a strong pseudorandom permutation (Luby & Rackoff
// 1988): small domains need more.
constexpr int kRounds = 8;
// Domains of less than 2^8 places mix too little for short corpora.
constexpr int kMinHalfBits = 4;

}  // namespace

SampleOrder::SampleOrder(std::uint64_t seed, std::int64_t epoch, std::int64_t n)
    : key_(noise_key(seed, static_cast<std::uint64_t>(epoch), 0, NoisePurpose::kSampleOrder)),
      n_(static_cast<std::uint64_t>(n)),
      half_bits_(kMinHalfBits) {
  require(n >= 1, "an epoch has at least one sample");
  while (half_bits_ < 32 && (std::uint64_t{1} << (2 * half_bits_)) < n_) ++half_bits_;
}

std::int64_t SampleOrder::at(std::int64_t place) const {
  require(place >= 0 && static_cast<std::uint64_t>(place) < n_, "place outside the epoch");
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t value = static_cast<std::uint64_t>(place);
  do {
    std::uint64_t left = value >> half_bits_, right = value & mask;
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t mixed = philox(key_, static_cast<std::uint64_t>(round), right)[0] & mask;
      const std::uint64_t next = left ^ mixed;
      left = right;
      right = next;
    }
    value = (left << half_bits_) | right;
  } while (value >= n_);
  return static_cast<std::int64_t>(value);
}

std::int64_t epoch_shift(std::uint64_t seed, std::int64_t epoch, std::int64_t length) {
  if (epoch == 0) return 0;
  // Layer 1: the permutation of the same epoch has the key of layer 0.
  const std::uint64_t key =
      noise_key(seed, static_cast<std::uint64_t>(epoch), 1, NoisePurpose::kSampleOrder);
  const auto words = philox(key, 0, 0);
  const std::uint64_t bits = (static_cast<std::uint64_t>(words[0]) << 32) | words[1];
  return static_cast<std::int64_t>(bits % static_cast<std::uint64_t>(length));
}

}  // namespace birkhoff
