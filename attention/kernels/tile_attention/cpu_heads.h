// Runs a kernel for one head (cpu_head.h) over all heads of all sequences. Legend: B batch, H
// heads, L queries, S keys, D head dim.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "attention/kernels/common/cpu_scratch.h"
#include "attention/kernels/tile_attention/cpu_head.h"
#include "attention/kernels/tile_attention/cpu_noise.h"

namespace birkhoff {

// Rows with unit stride (common/fitting_rows.h). Undefined where a pass does not need them.
struct HeadTensors {
  at::Tensor q_BHLD, k_BHSD, v_BHSD, out_BHLD;
  at::Tensor d_out_BHLD, d_q_BHLD, d_k_BHSD, d_v_BHSD;
  at::Tensor query_lengths_B, key_lengths_B;  // int64; undefined: L and S
  at::Tensor sample_ids_B;                    // int64; defined with dropout
  std::int64_t first_head = 0;                // of the noise of dropout

  void set_noise(const NoiseKey& noise) {
    sample_ids_B = noise.sample_ids_B;
    first_head = noise.first_head;
  }
};

template <typename T>
Rows<T> head_rows(const at::Tensor& x_BHLD, std::int64_t b, std::int64_t h) {
  if (!x_BHLD.defined()) return {};
  auto* data = static_cast<T*>(const_cast<void*>(x_BHLD.const_data_ptr()));
  return {data + b * x_BHLD.stride(0) + h * x_BHLD.stride(1), x_BHLD.stride(2)};
}

inline HeadShape head_shape(const HeadTensors& x, double scale, const TileDropout* dropout) {
  HeadShape shape;
  shape.max_queries = static_cast<int>(x.q_BHLD.size(2));
  shape.max_keys = static_cast<int>(x.k_BHSD.size(2));
  shape.head_dim = static_cast<int>(x.q_BHLD.size(3));
  shape.scale = scale;
  shape.dropout = dropout;
  return shape;
}

// Calls run(head, b, h, scratch) for each head that has a query and a key, with a Head (a kind of
// AttentionHead<T>) of its rows. A thread has its own scratch.
template <typename T, typename Head, typename Run>
void for_heads(const HeadTensors& x, std::size_t scratch_bytes, Run run) {
  const std::int64_t B = x.q_BHLD.size(0), H = x.q_BHLD.size(1), L = x.q_BHLD.size(2),
                     S = x.k_BHSD.size(2);
  const auto length = [](const at::Tensor& lengths_B, std::int64_t b, std::int64_t size) {
    if (!lengths_B.defined()) return static_cast<int>(size);
    return static_cast<int>(lengths_B.const_data_ptr<std::int64_t>()[b]);
  };
  at::parallel_for(0, B * H, 1, [&](std::int64_t begin, std::int64_t end) {
    const ScratchMemory scratch = scratch_memory(scratch_bytes);
    for (std::int64_t task = begin; task < end; ++task) {
      const std::int64_t b = task / H, h = task % H;
      Head head;
      head.num_queries = length(x.query_lengths_B, b, L);
      head.num_keys = length(x.key_lengths_B, b, S);
      if (head.num_queries == 0 || head.num_keys == 0) continue;
      head.q = head_rows<const T>(x.q_BHLD, b, h);
      head.k = head_rows<const T>(x.k_BHSD, b, h);
      head.v = head_rows<const T>(x.v_BHSD, b, h);
      head.out = head_rows<T>(x.out_BHLD, b, h);
      head.d_out = head_rows<const T>(x.d_out_BHLD, b, h);
      head.d_q = head_rows<T>(x.d_q_BHLD, b, h);
      head.d_k = head_rows<T>(x.d_k_BHSD, b, h);
      head.d_v = head_rows<T>(x.d_v_BHSD, b, h);
      if (x.sample_ids_B.defined()) {
        head.sample_id =
            static_cast<std::uint64_t>(x.sample_ids_B.const_data_ptr<std::int64_t>()[b]);
        head.first_element = (x.first_head + h) * L * S;
      }
      run(head, b, h, scratch.get());
    }
  });
}

}  // namespace birkhoff
