// Sums over the virtual shards of a global batch (configs.Invariant) along one fixed binary tree:
// the node of shards [begin, end) is the sum of its two halves, the first with (end - begin) / 2
// shards. Every rank that adds two nodes gets the same bits, so the root does not depend on which
// rank computed which shard. (Why floating-point sums need it: Demmel & Nguyen 2013, "Fast
// Reproducible Floating-Point Summation", section 1.)
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "cluster/base/interval.h"

namespace birkhoff {

// True if [first.begin, second.end) is a node whose halves are `first` and `second`.
bool are_halves(Interval first, Interval second, std::int64_t num_shards);

// The fewest nodes that together make up the shards `range`, in order.
std::vector<Interval> nodes_of(Interval range, std::int64_t num_shards);

// Adds up nodes, given in the order of their shards, as far as the tree allows.
class ShardSum {
 public:
  explicit ShardSum(std::int64_t num_shards) : num_shards_(num_shards) {}

  // Adds the sum over the node `shards`, which must begin where the last one ended. The tensor is
  // read, not kept.
  void add(Interval shards, const at::Tensor& sum);
  // The nodes that could not be added to each other: nodes_of() over all shards added so far.
  const std::vector<at::Tensor>& sums() const { return sums_; }
  // Forgets the sums and keeps their memory for the next ones.
  void clear();

 private:
  const std::int64_t num_shards_;
  std::vector<Interval> nodes_;
  std::vector<at::Tensor> sums_;   // of nodes_
  std::vector<at::Tensor> spare_;  // memory of earlier sums
};

}  // namespace birkhoff
