// Noise as a function of its key and position (cluster/base/random/philox.h):
//
//   out[r, e] = map(word e % 4 of philox(key, sample_ids[g / n],
//                                        e / 4 + offset + g % n * row_stride))
//   key       = noise_key(seed, step, layer, purpose), g = first_row + r, n = rows_of_sample;
//               rows beyond the last sample take its id
//
// out: [rows, inner] fp32. A thread computes one Philox block of four words and writes four
// elements at a time. The first thread of each block of 256 threads mixes the key for all, from the
// step in device memory. It uses integers and one exact product, so the bits equal the host's.
#include <algorithm>

#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/random/gpu_philox_params.h"
#include "cluster/base/random/philox_rounds.h"

namespace birkhoff {
namespace {

constexpr int kThreads = 256;
// Enough for 2,048 threads on each of 132 multiprocessors, four times over.
constexpr std::int64_t kMaxBlocks = 4224;

__global__ void __launch_bounds__(kThreads) philox_kernel(const PhiloxParams p) {
  __shared__ std::uint64_t key;
  if (threadIdx.x == 0) {
    key = mixed_noise_key(p.seed, static_cast<std::uint64_t>(*p.step), p.layer, p.purpose);
  }
  __syncthreads();
  const std::int64_t quads_of_row = (p.inner + 3) / 4, quads = p.rows * quads_of_row;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t q = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; q < quads; q += stride) {
    const std::int64_t row = q / quads_of_row, quad = q % quads_of_row;
    const std::int64_t of_all = p.first_row + row, sample = of_all / p.rows_of_sample;
    const std::uint64_t start =
        p.offset + static_cast<std::uint64_t>(of_all % p.rows_of_sample) * p.row_stride;
    const std::int64_t id = p.sample_ids[sample < p.num_samples ? sample : p.num_samples - 1];
    const PhiloxBlock block =
        philox_block(key, static_cast<std::uint64_t>(id), start + static_cast<std::uint64_t>(quad));
    Vector<float, 4> values;
    for (int i = 0; i < 4; ++i) {
      const float u = uniform_of(block.words[i]);
      values.elements[i] = p.is_mask ? (u > p.p ? p.scale : 0.0f) : u;
    }
    float* out = p.out + row * p.inner + 4 * quad;
    if (p.vectors) {
      store_vector(out, values);
    } else {
      for (int i = 0; i < 4 && 4 * quad + i < p.inner; ++i) out[i] = values.elements[i];
    }
  }
}

}  // namespace

void launch_philox(const PhiloxParams& params, cudaStream_t stream) {
  const std::int64_t quads = params.rows * ((params.inner + 3) / 4);
  const std::int64_t blocks = std::min((quads + kThreads - 1) / kThreads, kMaxBlocks);
  launch({.blocks = blocks, .threads = kThreads, .stream = stream}, philox_kernel, params);
}

}  // namespace birkhoff
