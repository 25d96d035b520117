// Dropout of probabilities in GPU kernels: the noise of philox_dropout(). For both g++ and nvcc: no
// LibTorch here. common/dropout_arguments.h makes the parameters from a key.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_source.h"
#include "cluster/base/random/philox_rounds.h"

namespace birkhoff {

struct DropoutParams {
  float p, scale;  // scale = 1 / (1 - p); p = 0: none
  std::uint64_t seed;
  const std::int64_t* step;  // device memory
  std::uint32_t layer, purpose;
  const std::int64_t* sample_ids;  // [batch], device memory
};

// The noise of one sample of the batch.
class SampleNoise {
 public:
  SampleNoise() = default;
  BIRKHOFF_DEVICE SampleNoise(const DropoutParams& dropout, int sample) {
    if (dropout.p == 0) return;
    key_ = mixed_noise_key(dropout.seed, static_cast<std::uint64_t>(*dropout.step), dropout.layer,
                           dropout.purpose);
    sample_ = static_cast<std::uint64_t>(dropout.sample_ids[sample]);
  }

  // Four elements of noise, the first of which is a multiple of four.
  BIRKHOFF_DEVICE PhiloxBlock four_around(std::uint64_t element) const {
    return philox_block(key_, sample_, element / 4);
  }
  // Whether dropout keeps an element of these four.
  static BIRKHOFF_DEVICE bool keeps(const DropoutParams& dropout, const PhiloxBlock& four,
                                    std::uint64_t element) {
    const std::uint32_t low = element % 2 != 0 ? four.words[1] : four.words[0];
    const std::uint32_t high = element % 2 != 0 ? four.words[3] : four.words[2];
    return uniform_of(element % 4 < 2 ? low : high) > dropout.p;
  }
  // The factor of one element.
  BIRKHOFF_DEVICE float factor(const DropoutParams& dropout, std::uint64_t element) const {
    return keeps(dropout, four_around(element), element) ? dropout.scale : 0.0f;
  }

 private:
  std::uint64_t key_ = 0, sample_ = 0;
};

}  // namespace birkhoff
