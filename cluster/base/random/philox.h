// Counter-based random numbers (Philox4x32-10; Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"). A number depends only on its key and counter, never on rank, thread or call
// order, so noise is the same for every number of ranks and after every resume.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace birkhoff {

// One Philox4x32-10 block: 128 random bits from a 64-bit key and a 128-bit counter.
std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter_high,
                                    std::uint64_t counter_low);

// Uniform in (0, 1], 24 bits: (bits >> 8 + 1) * 2^-24. Never 0, so its logarithm is finite.
float uniform_from_bits(std::uint32_t bits);

// The purpose of a noise stream. The values are part of the reproducibility promise: never
// renumber.
enum class NoisePurpose : std::uint32_t {
  kInit = 0,
  kSampleOrder = 1,
  kGumbel = 2,
  kAttentionDropout = 3,
  kEmbeddingDropout = 4,
  kResidualDropout = 5,
  kActivationDropout = 6,
  kSampling = 7,
  kReseed = 8,
  kTokenDropout = 9,
};

// Mixes the arguments into a 64-bit Philox key. Different arguments give unrelated streams.
std::uint64_t noise_key(std::uint64_t seed, std::uint64_t step, std::uint32_t layer,
                        NoisePurpose purpose);

// The key of all noise in one forward pass, before a layer and a purpose are chosen. Passed by
// value.
struct NoiseKey {
  std::uint64_t seed = 0;
  at::Tensor step;  // int64 [1] on the device of the computation; read by the operation, so that a
                    // captured graph replays with new noise
  std::uint32_t layer = 0;
  at::Tensor sample_ids_B;  // int64 [B], on that device: global sample of each row of the batch
  // Samples of the global batch of a training step, whose ids follow each other; 0: no such batch.
  std::int64_t global_batch = 0;
  // Attention only: the first of the heads that this rank computes, and the number of heads on all
  // ranks of the tensor axis; 0: all are here.
  std::int64_t first_head = 0, all_heads = 0;
  // all_heads, if this rank has `heads`.
  std::int64_t heads_of_layer(std::int64_t heads) const {
    return all_heads > 0 ? all_heads : heads;
  }

  NoiseKey at_layer(std::uint32_t new_layer) const;

  // The integers of a key, for an autograd node, which also saves `step` and `sample_ids_B`.
  std::vector<std::int64_t> integers() const;
  static NoiseKey of_integers(const std::vector<std::int64_t>& integers, const at::Tensor& step,
                              const at::Tensor& sample_ids_B);
};

// A rectangle of a tensor [B, rows, columns] whose samples' rows follow each other: rows from
// `first_row` on, counted over all samples, and columns from `first_column` on.
struct NoiseWindow {
  std::int64_t rows = 1, columns = 0;
  std::int64_t first_row = 0, first_column = 0;
};

// fp32 [B, inner...] uniform in (0, 1]: element e (row-major in the inner shape) of row b is word
// e % 4 of philox(noise_key(seed, step, layer, purpose), counter_high = sample_ids[b], counter_low
// = e / 4 + offset). The result is on the key's device and has the same bits on every device. This
// function and those below are asynchronous on a CUDA device's current stream.
at::Tensor philox_uniform(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape,
                          std::uint64_t offset = 0);

// Gumbel(0, 1): -log(-log(u)), finite for every u that the generator can return. The logarithms of
// two devices may differ in the last bit.
at::Tensor philox_gumbel(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape);

// x with elements zeroed with probability p and the rest scaled by 1 / (1 - p); x itself when p is
// 0. x: [B, ...], or [B, H, ...] with key.first_head: then heads are counted from that one.
at::Tensor philox_dropout(const at::Tensor& x, float p, const NoiseKey& key, NoisePurpose purpose);
// The same for a window of a larger tensor: x [..., columns of the window]. Rows beyond the last
// sample have arbitrary factors.
at::Tensor philox_dropout(const at::Tensor& x, float p, const NoiseKey& key, NoisePurpose purpose,
                          const NoiseWindow& window);

// fp32 [B, num_rows, row_size]: the factors of dropout, 0 or 1 / (1 - p). Element n of row r is
// element r row_stride + n of its sample; row_stride is a multiple of 4.
at::Tensor philox_dropout_rows(float p, const NoiseKey& key, NoisePurpose purpose,
                               std::int64_t num_rows, std::int64_t row_size,
                               std::int64_t row_stride);

}  // namespace birkhoff
