// The ten rounds of Philox4x32 (Salmon et al. 2011) and the mapping from words to numbers, for host
// and device. Compiled by g++ and nvcc: no LibTorch here.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

namespace birkhoff {

// Runs the rounds on the words of one counter, or of several (U64 is then a vector of 64-bit
// numbers). Each 64 bits hold one 32-bit word. word0 and word1 are the counter's low half, word2
// and word3 its high half.
template <typename U64>
[[gnu::always_inline]] BIRKHOFF_HOST_DEVICE inline void philox_rounds(std::uint64_t key, U64& word0,
                                                                      U64& word1, U64& word2,
                                                                      U64& word3) {
  constexpr std::uint32_t kMultiplier0 = 0xD2511F53;
  constexpr std::uint32_t kMultiplier1 = 0xCD9E8D57;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9;  // golden ratio
  constexpr std::uint32_t kWeyl1 = 0xBB67AE85;  // sqrt(3) - 1
  constexpr std::uint64_t kLow = 0xffffffff;
  std::uint32_t key0 = static_cast<std::uint32_t>(key);
  std::uint32_t key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const U64 product0 = word0 * kMultiplier0, product1 = word2 * kMultiplier1;
    word0 = (product1 >> 32) ^ word1 ^ key0;
    word1 = product1 & kLow;
    word2 = (product0 >> 32) ^ word3 ^ key1;
    word3 = product0 & kLow;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

// 128 random bits from a key and a counter. Always inlined, so that no copy that was compiled for
// one instruction set is linked in place of another.
struct PhiloxBlock {
  std::uint32_t words[4];
};
[[gnu::always_inline]] BIRKHOFF_HOST_DEVICE inline PhiloxBlock philox_block(
    std::uint64_t key, std::uint64_t counter_high, std::uint64_t counter_low) {
  constexpr std::uint64_t kLow = 0xffffffff;
  std::uint64_t word0 = counter_low & kLow, word1 = counter_low >> 32;
  std::uint64_t word2 = counter_high & kLow, word3 = counter_high >> 32;
  philox_rounds(key, word0, word1, word2, word3);
  return {{static_cast<std::uint32_t>(word0), static_cast<std::uint32_t>(word1),
           static_cast<std::uint32_t>(word2), static_cast<std::uint32_t>(word3)}};
}

// noise_key() of cluster/base/random/philox.h.
BIRKHOFF_HOST_DEVICE inline std::uint64_t mixed_noise_key(std::uint64_t seed, std::uint64_t step,
                                                          std::uint32_t layer,
                                                          std::uint32_t purpose) {
  // Philox itself is the mixer: its blocks under one key are as unrelated as random numbers.
  const PhiloxBlock block =
      philox_block(seed, step, static_cast<std::uint64_t>(layer) << 32 | purpose);
  return static_cast<std::uint64_t>(block.words[1]) << 32 | block.words[0];
}

// uniform_from_bits() of cluster/base/random/philox.h. At most 2^24: exact in fp32.
BIRKHOFF_HOST_DEVICE inline float uniform_of(std::uint32_t bits) {
  return static_cast<float>((bits >> 8) + 1) * 0x1p-24f;
}

}  // namespace birkhoff
