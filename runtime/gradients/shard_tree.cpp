#include "runtime/gradients/shard_tree.h"

#include <ATen/ops/empty_like.h>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// Halves of a node; a leaf has none.
Interval first_half(Interval node) {
  return {node.begin, node.begin + (node.end - node.begin) / 2};
}
Interval second_half(Interval node) { return {node.begin + (node.end - node.begin) / 2, node.end}; }

bool contains(Interval outer, Interval inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

void collect_nodes(Interval node, Interval range, std::vector<Interval>& nodes) {
  if (contains(range, node)) {
    nodes.push_back(node);
    return;
  }
  for (const Interval half : {first_half(node), second_half(node)}) {
    if (half.begin < range.end && range.begin < half.end) collect_nodes(half, range, nodes);
  }
}

}  // namespace

bool are_halves(Interval first, Interval second, std::int64_t num_shards) {
  const Interval both{first.begin, second.end};
  Interval node{0, num_shards};
  while (node != both) {
    if (node.size() < 2 || !contains(node, both)) return false;
    node = contains(first_half(node), both) ? first_half(node) : second_half(node);
  }
  return first == first_half(node) && second == second_half(node);
}

std::vector<Interval> nodes_of(Interval range, std::int64_t num_shards) {
  std::vector<Interval> nodes;
  if (range.size() > 0) collect_nodes({0, num_shards}, range, nodes);
  return nodes;
}

void ShardSum::add(Interval shards, const at::Tensor& sum) {
  require(nodes_.empty() || nodes_.back().end == shards.begin, "shards are added in their order");
  at::Tensor total = sum;
  bool own_memory = false;
  while (!nodes_.empty() && are_halves(nodes_.back(), shards, num_shards_)) {
    sums_.back().add_(total);
    if (own_memory) spare_.push_back(total);
    total = sums_.back();
    own_memory = true;
    shards = {nodes_.back().begin, shards.end};
    nodes_.pop_back();
    sums_.pop_back();
  }
  if (!own_memory) {
    if (spare_.empty()) {
      total = at::empty_like(sum);
    } else {
      total = spare_.back();
      spare_.pop_back();
    }
    total.copy_(sum);
  }
  nodes_.push_back(shards);
  sums_.push_back(total);
}

void ShardSum::clear() {
  spare_.insert(spare_.end(), sums_.begin(), sums_.end());
  nodes_.clear();
  sums_.clear();
}

}  // namespace birkhoff
