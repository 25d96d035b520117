#include <mpi.h>

#include "cluster/mpi_group.h"
#include "launcher/bench/collectives.h"

namespace birkhoff {

// MPI counts are ints; `bench comm` accepts only sizes that fit.
RunCollective mpi_collectives() {
  return [](Collective what, const at::Tensor& output, const at::Tensor& input) {
    void* const to = output.mutable_data_ptr();
    const void* const from = input.defined() ? input.const_data_ptr() : nullptr;
    const int count = static_cast<int>(output.numel());
    const MPI_Comm world = MPI_COMM_WORLD;
    switch (what) {
      case Collective::kAllReduce:
        return mpi_check(MPI_Allreduce(MPI_IN_PLACE, to, count, MPI_FLOAT, MPI_SUM, world),
                         "MPI_Allreduce");
      case Collective::kReduceScatter:
        return mpi_check(MPI_Reduce_scatter_block(from, to, count, MPI_FLOAT, MPI_SUM, world),
                         "MPI_Reduce_scatter_block");
      case Collective::kAllGather: {
        const int part = static_cast<int>(input.numel());
        return mpi_check(MPI_Allgather(from, part, MPI_FLOAT, to, part, MPI_FLOAT, world),
                         "MPI_Allgather");
      }
      case Collective::kAllToAll: {
        int ranks = 1;
        mpi_check(MPI_Comm_size(world, &ranks), "MPI_Comm_size");
        const int part = count / ranks;
        return mpi_check(MPI_Alltoall(from, part, MPI_FLOAT, to, part, MPI_FLOAT, world),
                         "MPI_Alltoall");
      }
      case Collective::kBroadcast:
        return mpi_check(MPI_Bcast(to, count, MPI_FLOAT, 0, world), "MPI_Bcast");
    }
  };
}

}  // namespace birkhoff
