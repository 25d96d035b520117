// Learning-rate schedules: pure functions of the step, so that resuming needs no state.
#pragma once

#include <cstdint>

namespace birkhoff::configs {
class Schedule;
}

namespace birkhoff {

// Learning rate of step `step` (1, 2, ..., num_steps).
double learning_rate(const configs::Schedule& schedule, std::int64_t step, std::int64_t num_steps);

}  // namespace birkhoff
