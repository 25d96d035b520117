// The reference implementations of `bench comm`: the same operations by the library that a
// ProcessGroup is built on.
#pragma once

#include "cluster/base/collectives/process_group.h"
#include "launcher/bench/collectives.h"

namespace birkhoff {

// MPI_Allreduce and the like, blocking, over all ranks of the current World. Error(kPeer).
RunCollective mpi_collectives();

// ncclAllReduce and the like, on LibTorch's current stream. Joins the ranks of `control`, a group
// for host tensors that is not used afterwards. `device`: this rank's GPU, which must be the
// current one. Exists only in builds with CUDA. No operation may be running when the last copy of
// the result is destroyed. Error(kPeer). Collective over control.
RunCollective nccl_collectives(ProcessGroup& control, at::Device device);

}  // namespace birkhoff
