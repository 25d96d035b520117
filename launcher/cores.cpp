#include "launcher/cores.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace birkhoff {

int machine_cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

int usable_cores() {
  cpu_set_t mine;
  CPU_ZERO(&mine);
  if (sched_getaffinity(0, sizeof mine, &mine) != 0) return machine_cores();
  return std::max(1, CPU_COUNT(&mine));
}

}  // namespace birkhoff
