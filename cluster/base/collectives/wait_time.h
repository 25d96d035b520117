// How long a thread has waited for other ranks: the time between the call and the return of
// Work::wait() (process_group.h), added up over all groups. What a rank computes itself takes the
// rest of a step. For GPU tensors wait() does not block: the GPU's stream waits, which nothing here
// counts.
#pragma once

namespace birkhoff {

// Seconds that the calling thread has waited so far. Local.
double waited_seconds();

// Adds to it. For ProcessGroup.
void add_waited_seconds(double seconds);

}  // namespace birkhoff
