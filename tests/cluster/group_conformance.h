// Checks that every implementation of ProcessGroup must pass, against closed forms and serial
// computations in rank order. All functions are collective over the group.
#pragma once

#include "cluster/base/collectives/process_group.h"

namespace birkhoff {

// Every operation, dtype and reduction, with sizes that do and do not divide among the ranks. Sums
// are taken in nodes of node_ranks first (cluster/two_levels.h).
void check_operations(ProcessGroup& group, int node_ranks = 1);
// Byte strings of different lengths.
void check_bytes(ProcessGroup& group);
// Several operations in flight, waited for in a different order.
void check_overlap(ProcessGroup& group);
// The ring holds the operations that were started, in order.
void check_ring(ProcessGroup& group);
// Wrong arguments are errors before anything is sent.
void check_misuse(ProcessGroup& group);

}  // namespace birkhoff
