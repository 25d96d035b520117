// B: rows of a batch.
#include "cluster/base/philox.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <vector>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

constexpr std::uint32_t kMultiplier0 = 0xD2511F53;
constexpr std::uint32_t kMultiplier1 = 0xCD9E8D57;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9;  // golden ratio
constexpr std::uint32_t kWeyl1 = 0xBB67AE85;  // sqrt(3) - 1
constexpr int kNumRounds = 10;

std::uint32_t low_word(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
std::uint32_t high_word(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

// kLanes consecutive counters at once: words[w][lane] = word w of philox(key, counter_high,
// counter_low + lane). Every loop over lanes is one vector operation of whatever width the calling
// function is compiled for.
constexpr int kLanes = 16;
using Words = std::uint32_t[4][kLanes];

[[gnu::always_inline]] inline void philox_lanes(std::uint64_t key, std::uint64_t counter_high,
                                                std::uint64_t counter_low, Words& words) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const std::uint64_t counter = counter_low + static_cast<std::uint64_t>(lane);
    words[0][lane] = low_word(counter);
    words[1][lane] = high_word(counter);
    words[2][lane] = low_word(counter_high);
    words[3][lane] = high_word(counter_high);
  }
  std::uint32_t key0 = low_word(key), key1 = high_word(key);
  for (int round = 0; round < kNumRounds; ++round) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::uint64_t product0 = std::uint64_t{kMultiplier0} * words[0][lane];
      const std::uint64_t product1 = std::uint64_t{kMultiplier1} * words[2][lane];
      const std::uint32_t word1 = words[1][lane], word3 = words[3][lane];
      words[0][lane] = high_word(product1) ^ word1 ^ key0;
      words[1][lane] = low_word(product1);
      words[2][lane] = high_word(product0) ^ word3 ^ key1;
      words[3][lane] = low_word(product0);
    }
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

// A row's elements [first_element, last_element); first_element is a multiple of 4 * kLanes.
struct RowPart {
  std::uint64_t key, counter_high, counter_low;  // of the row's element 0
  std::int64_t first_element, last_element;
};

// out[e - first_element] = map(word of element e).
template <typename Map>
[[gnu::always_inline]] inline void fill(const RowPart& part, float* out, Map map) {
  constexpr std::int64_t kElements = 4 * kLanes;
  for (std::int64_t e = part.first_element; e < part.last_element; e += kElements) {
    Words words;
    philox_lanes(part.key, part.counter_high, part.counter_low + static_cast<std::uint64_t>(e / 4),
                 words);
    float values[kElements];
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int w = 0; w < 4; ++w) values[4 * lane + w] = map(words[w][lane]);
    }
    const std::int64_t count = std::min(kElements, part.last_element - e);
    std::copy_n(values, count, out + (e - part.first_element));
  }
}

[[gnu::always_inline]] inline float to_uniform(std::uint32_t bits) {
  return static_cast<float>(static_cast<std::int32_t>((bits >> 8) + 1)) * 0x1p-24f;
}

// What an element's 32 bits become: the number itself, or a dropout mask's entry.
struct Uniform {
  [[gnu::always_inline]] float operator()(std::uint32_t bits) const { return to_uniform(bits); }
};
struct Mask {
  float p, scale;
  [[gnu::always_inline]] float operator()(std::uint32_t bits) const {
    return to_uniform(bits) > p ? scale : 0.0f;
  }
};

// The same loop for the instruction sets of the day, chosen once a process.
#if defined(__x86_64__)
template <typename Map>
[[gnu::target("avx512f,avx512dq,prefer-vector-width=512")]] void fill_avx512(const RowPart& part,
                                                                             float* out, Map map) {
  fill(part, out, map);
}
template <typename Map>
[[gnu::target("avx2")]] void fill_avx2(const RowPart& part, float* out, Map map) {
  fill(part, out, map);
}
#endif
template <typename Map>
void fill_portable(const RowPart& part, float* out, Map map) {
  fill(part, out, map);
}

template <typename Map>
void fill_dispatched(const RowPart& part, float* out, Map map) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512dq")) return fill_avx512(part, out, map);
  if (__builtin_cpu_supports("avx2")) return fill_avx2(part, out, map);
#endif
  fill_portable(part, out, map);
}

// fp32 [B, inner...] of map(bits), in parallel over pieces of rows; no number depends on how rows
// are cut.
template <typename Map>
at::Tensor generate(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape,
                    std::uint64_t offset, Map map) {
  const at::Tensor& ids_B = key.sample_ids_B;
  require(ids_B.defined() && ids_B.dim() == 1 && ids_B.scalar_type() == at::kLong &&
              ids_B.is_contiguous() && ids_B.device().is_cpu(),
          "noise: sample_ids must be a contiguous int64 [B] on the CPU");
  require(key.step.defined() && key.step.numel() == 1 && key.step.scalar_type() == at::kLong &&
              key.step.device().is_cpu(),
          "noise: step must be an int64 [1] on the CPU");
  std::vector<std::int64_t> shape{ids_B.size(0)};
  shape.insert(shape.end(), inner_shape.begin(), inner_shape.end());
  at::Tensor out = at::empty(shape, at::TensorOptions().dtype(at::kFloat));
  if (out.numel() == 0) return out;

  const auto step = static_cast<std::uint64_t>(*key.step.const_data_ptr<std::int64_t>());
  const std::uint64_t philox_key = noise_key(key.seed, step, key.layer, purpose);
  const std::int64_t* ids = ids_B.const_data_ptr<std::int64_t>();
  float* data = out.mutable_data_ptr<float>();
  const std::int64_t num_inner = out.numel() / ids_B.size(0);
  constexpr std::int64_t kPiece = 4096;  // elements, a few microseconds; a multiple of 4 * kLanes
  const std::int64_t pieces_per_row = (num_inner + kPiece - 1) / kPiece;
  at::parallel_for(0, ids_B.size(0) * pieces_per_row,
                   std::max<std::int64_t>(1, 65536 / std::min(num_inner, kPiece)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t piece = begin; piece < end; ++piece) {
                       const std::int64_t row = piece / pieces_per_row;
                       const std::int64_t first = piece % pieces_per_row * kPiece;
                       const RowPart part{philox_key, static_cast<std::uint64_t>(ids[row]), offset,
                                          first, std::min(first + kPiece, num_inner)};
                       fill_dispatched(part, data + row * num_inner + first, map);
                     }
                   });
  return out;
}

}  // namespace

std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter_high,
                                    std::uint64_t counter_low) {
  Words words;
  philox_lanes(key, counter_high, counter_low, words);
  return {words[0][0], words[1][0], words[2][0], words[3][0]};
}

float uniform_from_bits(std::uint32_t bits) { return to_uniform(bits); }

std::uint64_t noise_key(std::uint64_t seed, std::uint64_t step, std::uint32_t layer,
                        NoisePurpose purpose) {
  // Philox itself is the mixer: its blocks under one key are as unrelated as random numbers are.
  const std::uint64_t stream = std::uint64_t{layer} << 32 | static_cast<std::uint32_t>(purpose);
  const std::array<std::uint32_t, 4> words = philox(seed, step, stream);
  return std::uint64_t{words[1]} << 32 | words[0];
}

NoiseKey NoiseKey::at_layer(std::uint32_t new_layer) const {
  NoiseKey key = *this;
  key.layer = new_layer;
  return key;
}

at::Tensor philox_uniform(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape,
                          std::uint64_t offset) {
  return generate(key, purpose, inner_shape, offset, Uniform{});
}

at::Tensor philox_gumbel(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape) {
  // Half a step below u, in (0, 1): fp64, because 1 - 2^-25 is no fp32 number and log(1) would give
  // infinity.
  at::Tensor u = philox_uniform(key, purpose, inner_shape).to(at::kDouble).sub_(0x1p-25);
  return u.log_().neg_().log_().neg_().to(at::kFloat);
}

at::Tensor philox_dropout(const at::Tensor& x, float p, const NoiseKey& key, NoisePurpose purpose) {
  require(p >= 0 && p < 1, "dropout: p must be in [0, 1)");
  if (p == 0) return x;
  require(x.dim() >= 1 && x.size(0) == key.sample_ids_B.size(0),
          "dropout: x must have one row for each sample id");
  const at::Tensor mask = generate(key, purpose, x.sizes().slice(1), 0, Mask{p, 1 / (1 - p)});
  return at::mul(x, mask).to(x.scalar_type());  // bf16 is multiplied in fp32 and rounded once
}

}  // namespace birkhoff
