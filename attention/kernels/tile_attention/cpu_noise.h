// The dropout of a call of the loop (cpu_loop.h) from its noise.
#pragma once

#include <cstdint>
#include <optional>

#include "attention/kernels/tile_attention/cpu_loop.h"
#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {

// None without noise, or if p is 0. `query_stride`: elements of noise from one query to the next.
inline std::optional<TileDropout> tile_dropout(float p, const std::optional<NoiseKey>& noise,
                                               std::int64_t batch, std::int64_t query_stride) {
  if (!noise || p == 0) return std::nullopt;
  require(p < 1 && noise->sample_ids_B.size(0) == batch,
          "dropout: p must be below 1, and each row needs a sample id");
  const auto step = static_cast<std::uint64_t>(*noise->step.const_data_ptr<std::int64_t>());
  return TileDropout{
      .key = noise_key(noise->seed, step, noise->layer, NoisePurpose::kAttentionDropout),
      .least = static_cast<std::uint32_t>(p * 0x1p24f),
      .scale = 1 / (1 - p),
      .query_stride = query_stride};
}

}  // namespace birkhoff
