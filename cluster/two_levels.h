// Collectives in two levels: ranks of a node exchange first, then the ranks at one position of all
// nodes. With n nodes, 2 (n - 1) / n of a tensor leave each node in an all-reduce, however many
// ranks it has. At one level each rank sends its own values to all others, so p ranks of a node
// send almost p times that.
//
// Rank = node * node_ranks + position. Sums are taken over the ranks of a node in order, then over
// nodes in order. bf16 accumulates in fp32 and is rounded after each level.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"
#include "cluster/pieces.h"

namespace birkhoff {

// A rank, and how the ranks of its group are spread over nodes.
struct NodeRanks {
  int rank, size;
  int node_ranks;  // ranks per node, a divisor of size

  int nodes() const { return size / node_ranks; }
  int node() const { return rank / node_ranks; }
  int position() const { return rank % node_ranks; }
  int at(int node, int position) const { return node * node_ranks + position; }
  // Whether there are two levels.
  bool two_levels() const { return node_ranks > 1 && node_ranks < size; }
};

// Whether all_reduce of a tensor sends it whole from every rank to every other, and broadcast on
// hosts from the root: one exchange instead of two, which is faster if a rank receives few bytes.
inline bool is_small(std::int64_t tensor_bytes, int num_ranks, bool on_gpus) {
  return tensor_bytes * num_ranks <= (on_gpus ? 1 << 20 : 1 << 16);
}

// What a group lends to these functions.
class Transfers {
 public:
  virtual ~Transfers() = default;
  // Adds a transfer: `send` goes to the peer, `receive` comes from it. A rank copies its own piece,
  // unless both are the same memory. Transfers between two ranks keep their order.
  virtual void add(int peer, const Piece& send, const Piece& receive) = 0;
  // Runs the added transfers.
  virtual void run() = 0;
  // Memory until the end of the operation.
  virtual std::byte* memory(std::size_t num_bytes) = 0;
  // output = op over `num_rows` adjacent rows, in order, which are as long as output.
  virtual void reduce_rows(const std::byte* rows, int num_rows, ReduceOp op, at::ScalarType dtype,
                           const Piece& output) = 0;
};

// As the operations of ProcessGroup. If `at_once`, each rank receives the whole tensors of all
// others and adds them in the same order: faster for small ones.
void all_reduce_in_levels(Transfers& transfers, const NodeRanks& ranks, const at::Tensor& tensor,
                          ReduceOp op, bool at_once);
void reduce_scatter_in_levels(Transfers& transfers, const NodeRanks& ranks,
                              const at::Tensor& output, const at::Tensor& input, ReduceOp op);
void all_gather_in_levels(Transfers& transfers, const NodeRanks& ranks, const at::Tensor& output,
                          const at::Tensor& input);

}  // namespace birkhoff
