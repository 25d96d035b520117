// The operations of a Group that `bench comm` measures, with the sizes, bandwidths and names of
// nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), and what they must give.
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

#include "cluster/base/collectives/group.h"

namespace birkhoff {

enum class Collective { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast };
inline constexpr Collective kCollectives[] = {Collective::kAllReduce, Collective::kReduceScatter,
                                              Collective::kAllGather, Collective::kAllToAll,
                                              Collective::kBroadcast};

// As the method of Group is called.
const char* collective_name(Collective what);

// busbw = algbw * bus_factor, where algbw = 4 * count bytes / time: the share of `count` that has
// to cross the link of a rank, whatever the algorithm. So busbw can be compared with the hardware's
// speed, and between numbers of ranks.
double bus_factor(Collective what, int ranks);

// Runs an operation on this rank. Host tensors are complete when it returns, those on a GPU once
// the current stream is there. Collective over the ranks.
using RunCollective =
    std::function<void(Collective, const at::Tensor& output, const at::Tensor& input)>;

// The operations of a group, which must outlive the result.
RunCollective group_collectives(Group& group);

// The tensors of one operation on one rank, on the CPU. All values are known to all ranks.
struct CollectiveTensors {
  at::Tensor output, input;
};
CollectiveTensors make_tensors(Collective what, std::int64_t count, int rank, int ranks);

// What make_tensors()' output must hold after the operation, sums taken in rank order. Takes room
// for a few tensors of `count`, however many ranks there are.
at::Tensor expected_output(Collective what, std::int64_t count, int rank, int ranks);

// Where two tensors of one shape first have different bits, as a line for the user; empty if
// nowhere. On the CPU, contiguous.
std::string first_difference(const at::Tensor& output, const at::Tensor& expected);

}  // namespace birkhoff
