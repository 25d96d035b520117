// The order of samples in an epoch: a keyed permutation of [0, n), computed one position at a time.
// No index is stored, so start-up time and memory do not depend on n, and every rank computes the
// same order.
#pragma once

#include <cstdint>

namespace birkhoff {

// A balanced Feistel network over the smallest power of four that holds n, with Philox as its round
// function. A value outside [0, n) is mapped again until it is inside (cycle walking, Black &
// Rogaway 2002, "Ciphers with arbitrary finite domains"). Expected cost: at most four passes
// through the network.
class Sampler {
 public:
  // n >= 1. The key is noise_key(seed, epoch, 0, NoisePurpose::kSampleOrder).
  Sampler(std::uint64_t seed, std::int64_t epoch, std::int64_t n);
  // The sample at position `place` of the epoch, both in [0, n).
  std::int64_t at(std::int64_t place) const;
  // The samples at positions [begin, end); faster than one by one.
  void read(std::int64_t begin, std::int64_t end, std::int64_t* samples) const;

 private:
  std::uint64_t key_;
  std::uint64_t n_;
  int half_bits_;
};

// The offset by which an epoch's samples are shifted along the stream, in [0, length): 0 in the
// first epoch, then a random number keyed by (seed, epoch).
std::int64_t epoch_shift(std::uint64_t seed, std::int64_t epoch, std::int64_t length);

}  // namespace birkhoff
