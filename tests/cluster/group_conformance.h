// What every implementation of Group must do, checked against closed forms and serial computations
// in rank order. All functions are collective over the group.
#pragma once

#include "cluster/base/collectives/group.h"

namespace birkhoff {

// Every operation, dtype and reduction, with sizes that do and do not divide among the ranks.
void check_operations(Group& group);
// Byte strings of different lengths.
void check_bytes(Group& group);
// Several operations in flight, waited for in another order.
void check_overlap(Group& group);
// The ring holds what was done, in order.
void check_ring(Group& group);
// Wrong arguments are errors before anything is sent.
void check_misuse(Group& group);

}  // namespace birkhoff
