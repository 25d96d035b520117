// The peers of `bench comm`: the same operations by the library that a Group is built on.
#pragma once

#include "cluster/base/collectives/group.h"
#include "launcher/bench/collectives.h"

namespace birkhoff {

// MPI_Allreduce and its like, blocking, over all ranks of the World that lives. An error:
// Error(kPeer).
RunCollective mpi_collectives();

// ncclAllReduce and its like, on LibTorch's current stream. Joins the ranks of `control`, a group
// for host tensors that is not used afterwards. `device`: this rank's GPU, the current one. Only
// builds with CUDA have it. No operation may run when the result's last copy is destroyed. An
// error: Error(kPeer). Collective over control.
RunCollective nccl_collectives(Group& control, at::Device device);

}  // namespace birkhoff
