// The parts of tensors that the ranks of a group exchange.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace birkhoff {

// The data sent to, or received from, one peer.
struct Piece {
  std::byte* data;
  std::size_t num_bytes;
};
// The pieces of up to four ranks need no memory of their own.
using Pieces = c10::SmallVector<Piece, 4>;

inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

// One piece after another, of counts[p] elements for rank p.
inline Pieces pieces_of(const at::Tensor& tensor, std::span<const std::int64_t> counts) {
  Pieces pieces;
  pieces.reserve(counts.size());
  std::byte* data = bytes_of(tensor);
  for (const std::int64_t count : counts) {
    pieces.push_back({data, static_cast<std::size_t>(count) * tensor.itemsize()});
    data += pieces.back().num_bytes;
  }
  return pieces;
}

// One of `num_ranks` nearly equal pieces of whole elements of a piece, or of a tensor.
inline Piece slice_of(const Piece& whole, std::size_t element_bytes, int num_ranks, int rank) {
  const std::size_t elements = whole.num_bytes / element_bytes;
  const auto start = [&](int of) {
    return elements * static_cast<std::size_t>(of) / static_cast<std::size_t>(num_ranks);
  };
  const std::size_t begin = start(rank), end = start(rank + 1);
  return {whole.data + begin * element_bytes, (end - begin) * element_bytes};
}
inline Piece slice_of(const at::Tensor& tensor, int num_ranks, int rank) {
  return slice_of({bytes_of(tensor), tensor.nbytes()}, tensor.itemsize(), num_ranks, rank);
}
// All of them.
inline Pieces slices_of(const Piece& whole, std::size_t element_bytes, int num_ranks) {
  Pieces slices;
  slices.reserve(static_cast<std::size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank)
    slices.push_back(slice_of(whole, element_bytes, num_ranks, rank));
  return slices;
}
inline Pieces slices_of(const at::Tensor& tensor, int num_ranks) {
  return slices_of({bytes_of(tensor), tensor.nbytes()}, tensor.itemsize(), num_ranks);
}

}  // namespace birkhoff
