// A group of ranks of which only one exists. The others are imitated: they always have its values.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/two_levels.h"

namespace birkhoff {

// Collective operations with one purpose.
struct Exchange {
  std::string what;  // "gradients", "values", ...
  std::int64_t operations = 0;
  std::int64_t bytes = 0;  // of this rank's inputs, as OperationRing counts them
  double sent_bytes = 0;   // to other ranks
  // Of these, the bytes to the next rank of a ring (NCCL's gathers), and in two levels
  // (mesh.ranks_per_node) those inside a node and those between nodes. The rest goes to all ranks
  // equally.
  double ring_bytes = 0, inside_node_bytes = 0, between_nodes_bytes = 0;
  bool in_backward_pass = false;  // gradients: may run while the backward pass continues
  bool in_replica = false;        // between the ranks that hold the parts of a model

  void add(const Exchange& other, int times) {
    operations += times * other.operations;
    bytes += times * other.bytes;
    sent_bytes += times * other.sent_bytes;
    ring_bytes += times * other.ring_bytes;
    inside_node_bytes += times * other.inside_node_bytes;
    between_nodes_bytes += times * other.between_nodes_bytes;
  }
};

// The ranks of a group, as far as its exchanges tell.
enum class GroupKind {
  kData,     // over all nodes
  kReplica,  // that hold the parts of a model
  kNode,     // of one node
  kNodes,    // one of each node
};

class ImitatedGroup final : public ProcessGroup {
 public:
  // `ranks`: this rank is ranks.rank. gathers_in_rings: as NcclGroup; MpiGroup sends all slices
  // directly. exchanges: where operations are counted; null: nowhere.
  ImitatedGroup(NodeRanks ranks, at::Device device, bool gathers_in_rings = false,
                std::vector<Exchange>* exchanges = nullptr, GroupKind kind = GroupKind::kData);
  int rank() const override { return ranks_.rank; }
  int size() const override { return ranks_.size; }
  at::Device device() const override { return device_; }

 protected:
  std::unique_ptr<Work> do_all_reduce(at::Tensor tensor, ReduceOp op) override;
  std::unique_ptr<Work> do_reduce_scatter(at::Tensor output, at::Tensor input,
                                          ReduceOp op) override;
  std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor input) override;
  std::unique_ptr<Work> do_all_to_all(at::Tensor output, std::vector<std::int64_t> receive_counts,
                                      at::Tensor input,
                                      std::vector<std::int64_t> send_counts) override;
  std::unique_ptr<Work> do_broadcast(at::Tensor tensor, int root) override;
  std::unique_ptr<Work> do_barrier() override;

 private:
  double share_of_others(const at::Tensor& tensor) const;
  void count(double sent_bytes, double ring_bytes = 0);
  // Of an exchange of this many bytes inside nodes, and of what a rank then owns between nodes.
  void count_levels(double bytes);
  // Counts the operation that is being started, and its input. Null: not counted.
  Exchange* next_operation();

  const NodeRanks ranks_;
  const at::Device device_;
  const bool rings_;
  std::vector<Exchange>* const exchanges_;
  const GroupKind kind_;
};

// The ranks of mesh.tensor for one of them, not counted. One rank: a group of one.
std::unique_ptr<ProcessGroup> imitated_tensor_axis(int ranks, at::Device device);

}  // namespace birkhoff
