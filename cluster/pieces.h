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
  pieces.reserve(counts.size());
  std::byte* data = bytes_of(tensor);
  for (const std::int64_t count : counts) {
    pieces.push_back({data, static_cast<std::size_t>(count) * tensor.itemsize()});
    data += pieces.back().num_bytes;
  }
  return pieces;
}

// All of a piece, or of a tensor, in nearly equal pieces of whole elements, one for each of
// `num_ranks`.
inline std::vector<Piece> slices_of(const Piece& whole, std::size_t element_bytes, int num_ranks) {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const std::size_t elements = whole.num_bytes / element_bytes;
  std::vector<Piece> slices;
  slices.reserve(ranks);
  for (std::size_t p = 0; p < ranks; ++p) {
    const std::size_t begin = elements * p / ranks, end = elements * (p + 1) / ranks;
    slices.push_back({whole.data + begin * element_bytes, (end - begin) * element_bytes});
  }
  return slices;
}
inline std::vector<Piece> slices_of(const at::Tensor& tensor, int num_ranks) {
  return slices_of({bytes_of(tensor), tensor.nbytes()}, tensor.itemsize(), num_ranks);
}

}  // namespace birkhoff
