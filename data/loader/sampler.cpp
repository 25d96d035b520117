#include "data/loader/sampler.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "cluster/base/error.h"
#include "cluster/base/instruction_set.h"
#include "cluster/base/random/philox.h"
#include "cluster/base/random/philox_rounds.h"

namespace birkhoff {
namespace {

// Four rounds make a Feistel network a strong pseudorandom permutation (Luby & Rackoff 1988), but
// small domains need more.
constexpr std::uint64_t kRounds = 8;
// Domains smaller than 2^8 would mix too little for short corpora.
constexpr int kMinHalfBits = 4;

struct Permutation {
  std::uint64_t key, n;
  int half_bits;
};

// Eight values in one register, or in several narrower ones: the compiler uses the instruction set
// of the calling function.
using U64x8 [[gnu::vector_size(64)]] = std::uint64_t;
constexpr std::int64_t kLanes = 8;

// One pass of eight values through the network.
[[gnu::always_inline]] inline void mix(const Permutation& of, std::uint64_t* values) {
  const std::uint64_t mask = (std::uint64_t{1} << of.half_bits) - 1;
  U64x8 value;
  std::memcpy(&value, values, sizeof(value));
  U64x8 left = value >> of.half_bits, right = value & mask;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    // philox(key, round, right)[0]; `right` has at most 32 bits.
    U64x8 word0 = right, word1{}, word2 = U64x8{} + round, word3{};
    philox_rounds(of.key, word0, word1, word2, word3);
    const U64x8 mixed = left ^ (word0 & mask);
    left = right;
    right = mixed;
  }
  value = left << of.half_bits | right;
  std::memcpy(values, &value, sizeof(value));
}

// The samples at positions [begin, end).
[[gnu::always_inline]] inline void read_loop(const Permutation& of, std::int64_t begin,
                                             std::int64_t end, std::int64_t* samples) {
  constexpr std::int64_t kAtOnce = 64;
  for (; begin < end; begin += kAtOnce, samples += kAtOnce) {
    std::array<std::uint64_t, kAtOnce> walking{};  // values not yet in [0, n), the first `count`
    std::array<std::int64_t, kAtOnce> places;      // of them in `samples`
    std::iota(walking.begin(), walking.end(), begin);
    std::iota(places.begin(), places.end(), 0);
    for (auto count = static_cast<std::size_t>(std::min(kAtOnce, end - begin)); count > 0;) {
      for (std::size_t i = 0; i < count; i += kLanes) mix(of, &walking[i]);
      std::size_t num_outside = 0;
      for (std::size_t i = 0; i < count; ++i) {
        if (walking[i] < of.n) {
          samples[places[i]] = static_cast<std::int64_t>(walking[i]);
        } else {
          places[num_outside] = places[i];
          walking[num_outside++] = walking[i];
        }
      }
      count = num_outside;
    }
  }
}

#if defined(__x86_64__)
[[gnu::target("avx512dq,prefer-vector-width=512")]] void read_avx512(const Permutation& of,
                                                                     std::int64_t begin,
                                                                     std::int64_t end,
                                                                     std::int64_t* samples) {
  read_loop(of, begin, end, samples);
}
[[gnu::target("avx2")]] void read_avx2(const Permutation& of, std::int64_t begin, std::int64_t end,
                                       std::int64_t* samples) {
  read_loop(of, begin, end, samples);
}
#endif

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
  const Permutation of{key_, n_, half_bits_};
#if defined(__x86_64__)
  const InstructionSet set = instruction_set();
  if (set >= InstructionSet::kAvx512) return read_avx512(of, begin, end, samples);
  if (set == InstructionSet::kAvx2) return read_avx2(of, begin, end, samples);
#endif
  read_loop(of, begin, end, samples);
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
