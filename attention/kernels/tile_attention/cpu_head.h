// One head of one sequence, for kernels that read all its keys tile by tile (cpu_head_body.h). No
// LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/kernels/common/number_types.h"
#include "attention/kernels/tile_attention/cpu_loop.h"

namespace birkhoff {

struct HeadShape {
  int max_queries = 0, max_keys = 0;  // L, S
  int head_dim = 0;
  double scale = 0;                      // of scores
  const TileDropout* dropout = nullptr;  // null: none
};

template <typename T>
struct AttentionHead {
  int num_queries = 0, num_keys = 0;  // that exist; the rows after them are not read
  Rows<const T> q, k, v;
  Rows<T> out;                     // forward only
  std::uint64_t sample_id = 0;     // of dropout
  std::int64_t first_element = 0;  // noise element of query 0 and key 0
  Rows<const T> d_out;             // backward only, as the gradients
  Rows<T> d_q, d_k, d_v;
};

}  // namespace birkhoff
