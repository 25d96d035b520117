// B: rows of a batch.
#include "cluster/base/random/philox.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mul.h>
#include <c10/util/accumulate.h>

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

// The counters of the rows of a tensor whose row 0 is row `first_row` of all samples' rows: row r
// of a sample begins at `offset` + r `stride`.
struct Counters {
  std::uint64_t offset = 0;
  std::int64_t rows = 1;  // of a sample
  std::uint64_t stride = 0;
  std::int64_t first_row = 0;

  std::int64_t sample(std::int64_t row, std::int64_t num_samples) const {
    return std::min((first_row + row) / rows, num_samples - 1);
  }
  std::uint64_t of_row(std::int64_t row) const {
    return offset + static_cast<std::uint64_t>((first_row + row) % rows) * stride;
  }
};

template <typename Map>
void launch(const NoiseKey& key, NoisePurpose purpose, const Counters& counters, Map map,
            std::int64_t rows, const at::Tensor& out) {
  const std::int64_t inner = out.numel() / rows;
  PhiloxParams params{};
  params.seed = key.seed;
  params.step = key.step.const_data_ptr<std::int64_t>();
  params.layer = key.layer;
  params.purpose = static_cast<std::uint32_t>(purpose);
  params.sample_ids = key.sample_ids_B.const_data_ptr<std::int64_t>();
  params.num_samples = key.sample_ids_B.size(0);
  params.first_row = counters.first_row;
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

// fp32 `shape` of map(bits), in parallel over pieces of its `num_rows` rows. No element depends on
// how rows are cut into pieces.
template <typename Map>
at::Tensor generate(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef shape,
                    std::int64_t num_rows, const Counters& counters, Map map) {
  const at::Tensor& ids_B = key.sample_ids_B;
  require(ids_B.defined() && ids_B.dim() == 1 && ids_B.scalar_type() == at::kLong &&
              ids_B.is_contiguous(),
          "noise: sample_ids must be a contiguous int64 [B]");
  require(key.step.defined() && key.step.numel() == 1 && key.step.scalar_type() == at::kLong &&
              key.step.device() == ids_B.device(),
          "noise: step must be an int64 [1] on the device of sample_ids");
  at::Tensor out = at::empty(shape, ids_B.options().dtype(at::kFloat));
  if (out.numel() == 0 || out.is_meta()) return out;
  if (!out.is_cpu()) {
    require(kHasGpuKernels && out.is_cuda(), "noise: this program has no kernel for the device");
    launch(key, purpose, counters, map, num_rows, out);
    return out;
  }

  const auto step = static_cast<std::uint64_t>(*key.step.const_data_ptr<std::int64_t>());
  const std::uint64_t philox_key = noise_key(key.seed, step, key.layer, purpose);
  const std::int64_t* ids = ids_B.const_data_ptr<std::int64_t>();
  float* data = out.mutable_data_ptr<float>();
  const std::int64_t num_inner = out.numel() / num_rows;
  constexpr std::int64_t kPiece = 4096;  // elements, a few microseconds; a multiple of kBlock
  const std::int64_t pieces_per_row = (num_inner + kPiece - 1) / kPiece;
  at::parallel_for(
      0, num_rows * pieces_per_row, std::max<std::int64_t>(1, 65536 / std::min(num_inner, kPiece)),
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t piece = begin; piece < end; ++piece) {
          const std::int64_t row = piece / pieces_per_row;
          const std::int64_t first = piece % pieces_per_row * kPiece;
          const std::int64_t id = ids[counters.sample(row, ids_B.size(0))];
          const RowPart part{philox_key, static_cast<std::uint64_t>(id), counters.of_row(row),
                             first, std::min(first + kPiece, num_inner)};
          fill_dispatched(part, data + row * num_inner + first, map);
        }
      });
  return out;
}

std::vector<std::int64_t> with_samples(const NoiseKey& key, at::IntArrayRef inner_shape) {
  require(key.sample_ids_B.defined(), "noise needs sample ids");
  std::vector<std::int64_t> shape{key.sample_ids_B.size(0)};
  shape.insert(shape.end(), inner_shape.begin(), inner_shape.end());
  return shape;
}

Mask dropout_mask(float p) {
  require(p >= 0 && p < 1, "dropout: p must be in [0, 1)");
  return {p, 1 / (1 - p)};
}

at::Tensor times(const at::Tensor& x, const at::Tensor& factors) {
  return at::mul(x, factors).to(x.scalar_type());  // bf16 is multiplied in fp32 and rounded once
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

std::vector<std::int64_t> NoiseKey::integers() const {
  return {static_cast<std::int64_t>(seed), layer, first_head, all_heads};
}

NoiseKey NoiseKey::of_integers(const std::vector<std::int64_t>& integers, const at::Tensor& step,
                               const at::Tensor& sample_ids_B) {
  return {.seed = static_cast<std::uint64_t>(integers.at(0)),
          .step = step,
          .layer = static_cast<std::uint32_t>(integers.at(1)),
          .sample_ids_B = sample_ids_B,
          .first_head = integers.at(2),
          .all_heads = integers.at(3)};
}

at::Tensor philox_uniform(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape,
                          std::uint64_t offset) {
  const std::vector<std::int64_t> shape = with_samples(key, inner_shape);
  return generate(key, purpose, shape, shape[0], {.offset = offset}, Uniform{});
}

at::Tensor philox_gumbel(const NoiseKey& key, NoisePurpose purpose, at::IntArrayRef inner_shape) {
  // Moves u down by half a step, into (0, 1). In fp64, because 1 - 2^-25 is not an fp32 number, and
  // u = 1 would become infinity.
  at::Tensor u = philox_uniform(key, purpose, inner_shape).to(at::kDouble).sub_(0x1p-25);
  return u.log_().neg_().log_().neg_().to(at::kFloat);
}

at::Tensor philox_dropout(const at::Tensor& x, float p, const NoiseKey& key, NoisePurpose purpose) {
  const Mask mask = dropout_mask(p);
  if (p == 0) return x;
  require(x.dim() >= 1 && x.size(0) == key.sample_ids_B.size(0),
          "dropout: x must have one row for each sample id");
  const at::IntArrayRef inner = x.sizes().slice(1);
  if (key.first_head == 0) {
    return times(x, generate(key, purpose, x.sizes(), x.size(0), {}, mask));
  }
  // From the first word of a counter on.
  const std::int64_t size = c10::multiply_integers(inner), first = key.first_head * size / inner[0],
                     misfit = first % 4;
  const at::Tensor factors = generate(key, purpose, {x.size(0), misfit + size}, x.size(0),
                                      {.offset = static_cast<std::uint64_t>(first / 4)}, mask);
  return times(x, factors.narrow(1, misfit, size).view(x.sizes()));
}

at::Tensor philox_dropout(const at::Tensor& x, float p, const NoiseKey& key, NoisePurpose purpose,
                          const NoiseWindow& window) {
  const Mask mask = dropout_mask(p);
  if (p == 0) return x;
  const std::int64_t size = x.size(-1), num_rows = x.numel() / std::max<std::int64_t>(size, 1);
  require(window.first_column + size <= window.columns,
          "dropout: a window has at most all columns");
  const bool fits = window.columns % 4 == 0 && window.first_column % 4 == 0;
  // Rows that do not begin at a counter: all rows of each sample are generated, then cut.
  if (!fits) {
    const std::int64_t samples = key.sample_ids_B.size(0), past = samples * window.rows;
    const at::Tensor all = generate(key, purpose, {past, window.columns}, samples, {}, mask);
    const at::Tensor rows =
        at::arange(window.first_row, window.first_row + num_rows, key.sample_ids_B.options())
            .clamp_max(past - 1);
    return times(x,
                 all.index_select(0, rows).narrow(1, window.first_column, size).reshape(x.sizes()));
  }
  return times(x, generate(key, purpose, x.sizes(), num_rows,
                           {.offset = static_cast<std::uint64_t>(window.first_column / 4),
                            .rows = window.rows,
                            .stride = static_cast<std::uint64_t>(window.columns / 4),
                            .first_row = window.first_row},
                           mask));
}

at::Tensor philox_dropout_rows(float p, const NoiseKey& key, NoisePurpose purpose,
                               std::int64_t num_rows, std::int64_t row_size,
                               std::int64_t row_stride) {
  require(row_stride % 4 == 0, "dropout: rows begin at multiples of 4");
  const std::vector<std::int64_t> shape = with_samples(key, {num_rows, row_size});
  return generate(key, purpose, shape, shape[0] * num_rows,
                  {.rows = num_rows, .stride = static_cast<std::uint64_t>(row_stride / 4)},
                  dropout_mask(p));
}

}  // namespace birkhoff
