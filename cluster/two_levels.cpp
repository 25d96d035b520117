#include "cluster/two_levels.h"

#include <vector>

namespace birkhoff {
namespace {

// The ranks of this rank's node, or those at its position of all nodes.
struct Level {
  const NodeRanks& ranks;
  bool in_node;

  int size() const { return in_node ? ranks.node_ranks : ranks.nodes(); }
  int self() const { return in_node ? ranks.position() : ranks.node(); }
  int peer(int i) const {
    return in_node ? ranks.at(ranks.node(), i) : ranks.at(i, ranks.position());
  }
};

// pieces[i] goes to rank i of the level; output = op over what the level's ranks send here.
void reduce_among(Transfers& transfers, const Level& level, const Pieces& pieces, ReduceOp op,
                  at::ScalarType dtype, const Piece& output) {
  const std::size_t num_bytes = output.num_bytes;
  std::byte* rows = transfers.memory(num_bytes * pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    transfers.add(level.peer(static_cast<int>(i)), pieces[i], {rows + i * num_bytes, num_bytes});
  }
  transfers.run();
  transfers.reduce_rows(rows, level.size(), op, dtype, output);
}

// This rank's piece goes to all ranks of the level, theirs come from them.
void gather_among(Transfers& transfers, const Level& level, const Pieces& pieces) {
  const Piece& mine = pieces[static_cast<std::size_t>(level.self())];
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    transfers.add(level.peer(static_cast<int>(i)), mine, pieces[i]);
  }
  transfers.run();
}

}  // namespace

void all_reduce_in_levels(Transfers& transfers, const NodeRanks& ranks, const at::Tensor& tensor,
                          ReduceOp op, bool at_once) {
  const Level node{ranks, true}, nodes{ranks, false};
  if (at_once) {
    const Piece whole{bytes_of(tensor), tensor.nbytes()};
    std::byte* rows = transfers.memory(whole.num_bytes * static_cast<std::size_t>(ranks.size));
    for (int peer = 0; peer < ranks.size; ++peer) {
      const auto at = static_cast<std::size_t>(peer);
      transfers.add(peer, whole, {rows + at * whole.num_bytes, whole.num_bytes});
    }
    transfers.run();
    std::byte* sums = transfers.memory(whole.num_bytes * static_cast<std::size_t>(nodes.size()));
    for (int n = 0; n < nodes.size(); ++n) {
      const auto at = static_cast<std::size_t>(n);
      transfers.reduce_rows(rows + at * whole.num_bytes * static_cast<std::size_t>(node.size()),
                            node.size(), op, tensor.scalar_type(),
                            {sums + at * whole.num_bytes, whole.num_bytes});
    }
    return transfers.reduce_rows(sums, nodes.size(), op, tensor.scalar_type(), whole);
  }
  const Pieces of_node = slices_of(tensor, node.size());
  const Piece& mine = of_node[static_cast<std::size_t>(node.self())];
  const Pieces of_nodes = slices_of(mine, tensor.itemsize(), nodes.size());
  reduce_among(transfers, node, of_node, op, tensor.scalar_type(), mine);
  reduce_among(transfers, nodes, of_nodes, op, tensor.scalar_type(),
               of_nodes[static_cast<std::size_t>(nodes.self())]);
  gather_among(transfers, nodes, of_nodes);
  gather_among(transfers, node, of_node);
}

void reduce_scatter_in_levels(Transfers& transfers, const NodeRanks& ranks,
                              const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  const Level node{ranks, true}, nodes{ranks, false};
  const Pieces slices = slices_of(input, ranks.size);
  const std::size_t num_bytes = output.nbytes();
  const auto row_bytes = num_bytes * static_cast<std::size_t>(node.size());
  // Inside the node: what the ranks at this position of all nodes will own.
  std::byte* rows = transfers.memory(row_bytes * static_cast<std::size_t>(nodes.size()));
  for (int n = 0; n < nodes.size(); ++n) {
    for (int i = 0; i < node.size(); ++i) {
      const auto at = static_cast<std::size_t>(ranks.at(n, i));
      transfers.add(node.peer(i), slices[at], {rows + at * num_bytes, num_bytes});
    }
  }
  transfers.run();
  Pieces sums;
  std::byte* of_nodes = transfers.memory(num_bytes * static_cast<std::size_t>(nodes.size()));
  for (int n = 0; n < nodes.size(); ++n) {
    const auto at = static_cast<std::size_t>(n);
    sums.push_back({of_nodes + at * num_bytes, num_bytes});
    transfers.reduce_rows(rows + at * row_bytes, node.size(), op, input.scalar_type(), sums.back());
  }
  reduce_among(transfers, nodes, sums, op, input.scalar_type(), {bytes_of(output), num_bytes});
}

void all_gather_in_levels(Transfers& transfers, const NodeRanks& ranks, const at::Tensor& output,
                          const at::Tensor& input) {
  const Level node{ranks, true}, nodes{ranks, false};
  const Pieces slots = slices_of(output, ranks.size);
  const auto slot = [&](int n, int i) { return slots[static_cast<std::size_t>(ranks.at(n, i))]; };
  for (int n = 0; n < nodes.size(); ++n) {
    transfers.add(nodes.peer(n), {bytes_of(input), input.nbytes()}, slot(n, node.self()));
  }
  transfers.run();
  for (int n = 0; n < nodes.size(); ++n) {
    for (int i = 0; i < node.size(); ++i) {
      transfers.add(node.peer(i), slot(n, node.self()), slot(n, i));
    }
  }
  transfers.run();
}

}  // namespace birkhoff
