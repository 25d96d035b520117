// The operations of a ProcessGroup that `bench comm` measures, with the sizes, bandwidths and names
// of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), and their expected results.
//
// Tensors are fp32. An operation of size `count` (elements, a multiple of the number of ranks n):
//   all_reduce       output [count], in place: input is not read
//   reduce_scatter   output [count / n], input [count]
//   all_gather       output [count], input [count / n]
//   all_to_all       output [count], input [count], cut into n equal parts
//   broadcast        output [count], in place, from rank 0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "cluster/base/collectives/process_group.h"
#include "cluster/two_levels.h"
#include "launcher/measure/step_schedule.h"

namespace birkhoff {

inline constexpr Collective kCollectives[] = {Collective::kAllReduce, Collective::kReduceScatter,
                                              Collective::kAllGather, Collective::kAllToAll,
                                              Collective::kBroadcast};

// busbw = algbw * bus_factor, where algbw = 4 * count bytes / time. The factor is the share of
// `count` that must cross a rank's link, whatever the algorithm. So busbw can be compared with the
// hardware's speed and between numbers of ranks.
double bus_factor(Collective what, int ranks);

// Runs an operation on this rank. Host tensors are complete when it returns, GPU tensors once the
// current stream reaches that point. Collective over the ranks.
using RunCollective =
    std::function<void(Collective, const at::Tensor& output, const at::Tensor& input)>;

// The operations of a group, which must outlive the result.
RunCollective group_collectives(ProcessGroup& group);

// The same operations by the library that a ProcessGroup is built on, for reference.
//
// MPI_Allreduce and the like, blocking, over all ranks of the current World. Error(kPeer).
RunCollective mpi_collectives();

// ncclAllReduce and the like, on LibTorch's current stream. Joins the ranks of `control`, a group
// for host tensors that is not used afterwards. `device`: this rank's GPU, which must be the
// current one. Exists only in builds with CUDA. No operation may be running when the last copy of
// the result is destroyed. Error(kPeer). Collective over control.
RunCollective nccl_collectives(ProcessGroup& control, at::Device device);

// The tensors of one operation on one rank, on the CPU. Every rank can compute all values.
struct CollectiveTensors {
  at::Tensor output, input;
};
CollectiveTensors make_tensors(Collective what, std::int64_t count, int rank, int ranks);

// The expected output of make_tensors() after the operation, with sums taken over the ranks of each
// node in order, then over nodes in order (cluster/two_levels.h). Uses memory for a few tensors of
// `count` elements, whatever the number of ranks.
at::Tensor expected_output(Collective what, std::int64_t count, const NodeRanks& ranks);

// A line for the user about the first element whose bits differ between two tensors of one shape;
// empty if there is none. The tensors are contiguous and on the CPU.
std::string first_difference(const at::Tensor& output, const at::Tensor& expected);

}  // namespace birkhoff
