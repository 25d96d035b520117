// The order of samples in an epoch: a keyed permutation of [0, n), computed place by place. No
// index is stored, so start-up time and memory do not depend on n, and every rank computes the same
// order.
#pragma once

#include <cstdint>

namespace birkhoff {

// A balanced Feistel network over the smallest power of four that holds n, with Philox as its round
// function; places outside [0, n) are walked on along their cycle until inside (Black & Rogaway
// 2002, "Ciphers with arbitrary finite domains"). Expected cost: at most four passes through the
// network.
class SampleOrder {
 public:
  // n >= 1. The key is noise_key(seed, epoch, 0, NoisePurpose::kSampleOrder).
  SampleOrder(std::uint64_t seed, std::int64_t epoch, std::int64_t n);
  // The sample at a place of the epoch, both in [0, n).
  std::int64_t at(std::int64_t place) const;
  // The samples at places [begin, end), in less time than one by one.
  void read(std::int64_t begin, std::int64_t end, std::int64_t* samples) const;

 private:
  std::uint64_t key_;
  std::uint64_t n_;
  int half_bits_;
};

// How far the samples of an epoch are moved along the stream, in [0, length): 0 in the first epoch,
// then a number that (seed, epoch) keys.
std::int64_t epoch_shift(std::uint64_t seed, std::int64_t epoch, std::int64_t length);

}  // namespace birkhoff
