// Arguments of the kernel that generates noise. See cluster/base/random/gpu_philox.cu.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace birkhoff {

struct PhiloxParams {
  std::uint64_t seed;
  const std::int64_t* step;  // device memory: a captured graph can replay with another step
  std::uint32_t layer, purpose;
  const std::int64_t* sample_ids;  // [num_samples], device memory
  std::int64_t num_samples;
  std::int64_t rows, inner;
  std::int64_t rows_of_sample, first_row;  // `out` begins with that row of all samples
  // Of the counters, in blocks of four words: of all, and from one row of a sample to the next.
  std::uint64_t offset, row_stride;
  float* out;    // [rows, inner]
  bool vectors;  // rows of `out` can be written 16 bytes at a time
  // A uniform number u is written as it is, or for a dropout mask as u > p ? scale : 0.
  bool is_mask;
  float p, scale;
};

// Asynchronous on `stream`.
void launch_philox(const PhiloxParams& params, CUstream_st* stream);

}  // namespace birkhoff
