// Ranks as threads of one process, for unit tests of collective code without MPI. Results have the
// same bits as MpiGroup's: both reduce in rank order with reduce_in_order. An operation runs, and
// throws, where it is started.
#pragma once

#include <functional>

#include "cluster/base/collectives/process_group.h"

namespace birkhoff {

// Calls function(group) on `size` threads, each with its rank's group, and returns when all have
// ended. If one throws, operations on the other threads throw Error(kPeer), and the first exception
// is rethrown here. A rank that returns while other ranks wait in an operation is an error too, so
// a test with mismatched collectives fails instead of hanging.
void run_ranks(int size, const std::function<void(ProcessGroup&)>& function);

// The groups of a rank of a mesh: rank = data.rank() * tensor.size() + tensor.rank().
struct MeshRank {
  ProcessGroup &world, &data, &tensor;
};
// As run_ranks(), on data x tensor threads.
void run_mesh(int data, int tensor, const std::function<void(const MeshRank&)>& function);

}  // namespace birkhoff
