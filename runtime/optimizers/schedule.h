// Learning-rate schedules: pure functions of the step and of the position in the data, so that
// resuming needs no state.
#pragma once

#include <cstdint>

namespace birkhoff::configs {
class Schedule;
}

namespace birkhoff {

// Learning rate of step `step` (1, 2, ..., num_steps). epoch: of the step's first sample, from 0.
double learning_rate(const configs::Schedule& schedule, std::int64_t step, std::int64_t num_steps,
                     std::int64_t epoch);

}  // namespace birkhoff
