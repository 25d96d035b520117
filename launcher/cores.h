// How many cores this process may use.
#pragma once

namespace birkhoff {

// Cores in this process' affinity mask (what sbatch, taskset or a container allow), at least 1.
int usable_cores();
// Cores of the machine, at least 1.
int machine_cores();

}  // namespace birkhoff
