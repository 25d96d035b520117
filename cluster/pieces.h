// The parts of tensors that the ranks of a group exchange.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace birkhoff {

// The data sent to, or received from, one peer.
struct Piece {
  std::byte* data;
  std::size_t num_bytes;
};

inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

// One piece after another, of counts[p] elements for rank p.
inline std::vector<Piece> pieces_of(const at::Tensor& tensor,
                                    const std::vector<std::int64_t>& counts) {
  std::vector<Piece> pieces;
  std::byte* data = bytes_of(tensor);
  for (const std::int64_t count : counts) {
    pieces.push_back({data, static_cast<std::size_t>(count) * tensor.itemsize()});
    data += pieces.back().num_bytes;
  }
  return pieces;
}

// The whole tensor in nearly equal pieces, one for each of `num_ranks`.
inline std::vector<Piece> slices_of(const at::Tensor& tensor, int num_ranks) {
  const auto first = [&](int p) { return tensor.numel() * p / num_ranks; };
  std::vector<std::int64_t> counts;
  for (int p = 0; p < num_ranks; ++p) counts.push_back(first(p + 1) - first(p));
  return pieces_of(tensor, counts);
}

}  // namespace birkhoff
