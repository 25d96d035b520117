// B: rows of a batch.
#include "cluster/base/random/philox.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/instruction_set.h"
#include "cluster/base/random/gpu_philox_params.h"
#include "cluster/base/random/philox_rounds.h"

namespace birkhoff {
namespace {

// Sixteen 32-bit or eight 64-bit integers in one register, or in several narrower ones: the
// compiler uses the instruction set of the calling function.
using U64x8 [[gnu::vector_size(64)]] = std::uint64_t;
using U32x16 [[gnu::vector_size(64)]] = std::uint32_t;
using I32x16 [[gnu::vector_size(64)]] = std::int32_t;
using F32x16 [[gnu::vector_size(64)]] = float;
constexpr std::int64_t kLanes = 8;  // counters at once
constexpr std::int64_t kBlock = 4 * kLanes;

// The words of philox(key, counter_high, counter_low + lane), lane 0 to 7, in row order: the four
// words of lane 0 come first. Vectors are passed by reference, because passing them by value
// depends on the instruction set.
[[gnu::always_inline]] inline void philox_lanes(std::uint64_t key, std::uint64_t counter_high,
                                                std::uint64_t counter_low, U32x16& first,
                                                U32x16& second) {
  constexpr std::uint64_t kLow = 0xffffffff;
  const U64x8 counter = counter_low + U64x8{0, 1, 2, 3, 4, 5, 6, 7};
  U64x8 word0 = counter & kLow, word1 = counter >> 32;
  U64x8 word2 = U64x8{} + (counter_high & kLow), word3 = U64x8{} + (counter_high >> 32);
  philox_rounds(key, word0, word1, word2, word3);
  const U64x8 words01 = word0 | word1 << 32, words23 = word2 | word3 << 32;
  first =
      reinterpret_cast<U32x16>(__builtin_shufflevector(words01, words23, 0, 8, 1, 9, 2, 10, 3, 11));
  second = reinterpret_cast<U32x16>(
      __builtin_shufflevector(words01, words23, 4, 12, 5, 13, 6, 14, 7, 15));
}

// The map of an element's 32 bits: to the uniform number itself, or to an entry of a dropout mask.
struct Uniform {
  [[gnu::always_inline]] void operator()(const U32x16& bits, float* out) const {
    // At most 2^24: exact in fp32.
    const auto integers = reinterpret_cast<I32x16>((bits >> 8) + 1);
    const F32x16 u = __builtin_convertvector(integers, F32x16) * 0x1p-24f;
    std::memcpy(out, &u, sizeof(u));
  }
};
struct Mask {
  float p, scale;
  [[gnu::always_inline]] void operator()(const U32x16& bits, float* out) const {
    const auto integers = reinterpret_cast<I32x16>((bits >> 8) + 1);
    const F32x16 u = __builtin_convertvector(integers, F32x16) * 0x1p-24f;
    const F32x16 entries = u > p ? F32x16{} + scale : F32x16{};
    std::memcpy(out, &entries, sizeof(entries));
  }
};

// A row's elements [first_element, last_element); first_element is a multiple of kBlock.
struct RowPart {
  std::uint64_t key, counter_high, counter_low;  // of the row's element 0
  std::int64_t first_element, last_element;
};

// out[e - first_element] = map(word of element e).
template <typename Map>
[[gnu::always_inline]] inline void fill(const RowPart& part, float* out, Map map) {
  const std::int64_t num_elements = part.last_element - part.first_element;
  const std::uint64_t counter =
      part.counter_low + static_cast<std::uint64_t>(part.first_element / 4);
  for (std::int64_t e = 0; e < num_elements; e += kBlock) {
    U32x16 first, second;
    philox_lanes(part.key, part.counter_high, counter + static_cast<std::uint64_t>(e / 4), first,
                 second);
    if (num_elements - e >= kBlock) {
      map(first, out + e);
      map(second, out + e + kBlock / 2);
    } else {
      float rest[kBlock];
      map(first, rest);
      map(second, rest + kBlock / 2);
      std::copy_n(rest, num_elements - e, out + e);
    }
  }
}

// The same loop for several instruction sets, of which each process uses one.
#if defined(__x86_64__)
template <typename Map>
[[gnu::target("avx512dq,prefer-vector-width=512")]] void fill_avx512(const RowPart& part,
                                                                     float* out, Map map) {
  fill(part, out, map);
}
template <typename Map>
[[gnu::target("avx2")]] void fill_avx2(const RowPart& part, float* out, Map map) {
  fill(part, out, map);
}
#endif
template <typename Map>
void fill_dispatched(const RowPart& part, float* out, Map map) {
#if defined(__x86_64__)
  const InstructionSet set = instruction_set();
  if (set >= InstructionSet::kAvx512) return fill_avx512(part, out, map);
  if (set == InstructionSet::kAvx2) return fill_avx2(part, out, map);
#endif
  fill(part, out, map);
}

void set_map(PhiloxParams& params, Uniform) { params.is_mask = false; }
void set_map(PhiloxParams& params, Mask mask) {
  params.is_mask = true;
  params.p = mask.p;
  params.scale = mask.scale;
}

// The counters of a sample's rows: row r begins at `offset` + r `stride`.
struct Counters {
  std::uint64_t offset = 0;
  std::int64_t rows = 1;  // of a sample
  std::uint64_t stride = 0;

  std::uint64_t of_row(std::int64_t row) const {
    return offset + static_cast<std::uint64_t>(row % rows) * stride;
  }
};

template <typename Map>
void launch(const NoiseKey& key, NoisePurpose purpose, const Counters& counters, Map map,
            const at::Tensor& out) {
  const std::int64_t rows = out.size(0) * counters.rows, inner = out.numel() / rows;
  PhiloxParams params{};
  params.seed = key.seed;
  params.step = key.step.const_data_ptr<std::int64_t>();
  params.layer = key.layer;
  params.purpose = static_cast<std::uint32_t>(purpose);
  params.sample_ids = key.sample_ids_B.const_data_ptr<std::int64_t>();
  params.rows = rows;
  params.inner = inner;
  params.offset = counters.offset;
  params.rows_of_sample = counters.rows;
  params.row_stride = counters.stride;
  params.out = out.mutable_data_ptr<float>();
  params.vectors = fits_vectors(out, inner * static_cast<std::int64_t>(sizeof(float)));
  set_map(params, map);
  if constexpr (kHasGpuKernels) launch_philox(params, current_stream(out));
}

// fp32 [B, inner...] of map(bits), in parallel over pieces of rows; with several rows of a sample,
// they are the first inner dimension. No element depends on how rows are cut into pieces.
template <typename Map>
at::Tensor generate(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape,
                    const Counters& counters, Map map) {
  const at::Tensor& ids_B = key.sample_ids_B;
  require(ids_B.defined() && ids_B.dim() == 1 && ids_B.scalar_type() == at::kLong &&
              ids_B.is_contiguous(),
          "noise: sample_ids must be a contiguous int64 [B]");
  require(key.step.defined() && key.step.numel() == 1 && key.step.scalar_type() == at::kLong &&
              key.step.device() == ids_B.device(),
          "noise: step must be an int64 [1] on the device of sample_ids");
  std::vector<std::int64_t> shape{ids_B.size(0)};
  shape.insert(shape.end(), inner_shape.begin(), inner_shape.end());
  at::Tensor out = at::empty(shape, ids_B.options().dtype(at::kFloat));
  if (out.numel() == 0 || out.is_meta()) return out;
  if (!out.is_cpu()) {
    require(kHasGpuKernels && out.is_cuda(), "noise: this program has no kernel for the device");
    launch(key, purpose, counters, map, out);
    return out;
  }

  const auto step = static_cast<std::uint64_t>(*key.step.const_data_ptr<std::int64_t>());
  const std::uint64_t philox_key = noise_key(key.seed, step, key.layer, purpose);
  const std::int64_t* ids = ids_B.const_data_ptr<std::int64_t>();
  float* data = out.mutable_data_ptr<float>();
  const std::int64_t num_rows = ids_B.size(0) * counters.rows, num_inner = out.numel() / num_rows;
  constexpr std::int64_t kPiece = 4096;  // elements, a few microseconds; a multiple of kBlock
  const std::int64_t pieces_per_row = (num_inner + kPiece - 1) / kPiece;
  at::parallel_for(
      0, num_rows * pieces_per_row, std::max<std::int64_t>(1, 65536 / std::min(num_inner, kPiece)),
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t piece = begin; piece < end; ++piece) {
          const std::int64_t row = piece / pieces_per_row;
          const std::int64_t first = piece % pieces_per_row * kPiece;
          const RowPart part{philox_key, static_cast<std::uint64_t>(ids[row / counters.rows]),
                             counters.of_row(row), first, std::min(first + kPiece, num_inner)};
          fill_dispatched(part, data + row * num_inner + first, map);
        }
      });
  return out;
}

}  // namespace

std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter_high,
                                    std::uint64_t counter_low) {
  return std::to_array(philox_block(key, counter_high, counter_low).words);
}

float uniform_from_bits(std::uint32_t bits) { return uniform_of(bits); }

std::uint64_t noise_key(std::uint64_t seed, std::uint64_t step, std::uint32_t layer,
                        NoisePurpose purpose) {
  return mixed_noise_key(seed, step, layer, static_cast<std::uint32_t>(purpose));
}

NoiseKey NoiseKey::at_layer(std::uint32_t new_layer) const {
  NoiseKey key = *this;
  key.layer = new_layer;
  return key;
}

at::Tensor philox_uniform(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape,
                          std::uint64_t offset) {
  return generate(key, purpose, inner_shape, {.offset = offset}, Uniform{});
}

at::Tensor philox_gumbel(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape) {
  // Moves u down by half a step, into (0, 1). In fp64, because 1 - 2^-25 is not an fp32 number, and
  // u = 1 would become infinity.
  at::Tensor u = philox_uniform(key, purpose, inner_shape).to(at::kDouble).sub_(0x1p-25);
  return u.log_().neg_().log_().neg_().to(at::kFloat);
}

at::Tensor philox_dropout(const at::Tensor& x, float p, const NoiseKey& key, NoisePurpose purpose) {
  require(p >= 0 && p < 1, "dropout: p must be in [0, 1)");
  if (p == 0) return x;
  require(x.dim() >= 1 && x.size(0) == key.sample_ids_B.size(0),
          "dropout: x must have one row for each sample id");
  const at::Tensor mask = generate(key, purpose, x.sizes().slice(1), {}, Mask{p, 1 / (1 - p)});
  return at::mul(x, mask).to(x.scalar_type());  // bf16 is multiplied in fp32 and rounded once
}

at::Tensor philox_dropout_rows(float p, const NoiseKey& key, NoisePurpose purpose,
                               std::int64_t num_rows, std::int64_t row_size,
                               std::int64_t row_stride) {
  require(p >= 0 && p < 1 && row_stride % 4 == 0,
          "dropout: p must be in [0, 1), and rows begin at multiples of 4");
  return generate(key, purpose, {num_rows, row_size},
                  {.rows = num_rows, .stride = static_cast<std::uint64_t>(row_stride / 4)},
                  Mask{p, 1 / (1 - p)});
}

}  // namespace birkhoff
