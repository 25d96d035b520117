// The time that a thread has waited for other ranks: between the call and the return of
// Work::wait() (process_group.h), summed over all groups. The rest of a step is the rank's own
// work. For GPU tensors wait() does not block: the GPU's stream waits, which is not counted here.
#pragma once

namespace birkhoff {

// Seconds that the calling thread has waited so far. Local.
double waited_seconds();

// Adds `seconds` to the waiting time of the calling thread. Only a ProcessGroup calls it, where
// Work::wait() returns.
void add_waited_seconds(double seconds);

}  // namespace birkhoff
