#include "runtime/optimizers/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

double learning_rate(const configs::Schedule& schedule, std::int64_t step, std::int64_t num_steps,
                     std::int64_t epoch) {
  const double peak = schedule.learning_rate();
  const double warmup = static_cast<double>(schedule.warmup_steps());
  const double s = static_cast<double>(step);
  const double rise = s < warmup ? s / warmup : 1.0;
  const auto end = static_cast<double>(schedule.steps() > 0 ? schedule.steps() : num_steps);
  switch (schedule.shape()) {
    case configs::Schedule::constant:
      return peak * rise;
    case configs::Schedule::cosine: {
      if (s <= warmup) return peak * rise;
      const double final_rate = schedule.final_learning_rate();
      const double progress = std::min(1.0, (s - warmup) / (end - warmup));
      return final_rate + (peak - final_rate) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    }
    case configs::Schedule::rsqrt:
      return s <= warmup ? peak * rise : peak * std::sqrt(std::max(warmup, 1.0) / s);
    case configs::Schedule::rsqrt_decay: {
      const double held = std::max(warmup, 1.0);
      return peak * std::sqrt(held / std::max(s, held));
    }
    case configs::Schedule::step_decay: {
      const auto& epochs = schedule.decay_epoch();
      const auto decays =
          std::count_if(epochs.begin(), epochs.end(), [=](auto at) { return epoch >= at; });
      return peak * rise * std::pow(schedule.decay_factor(), static_cast<double>(decays));
    }
    case configs::Schedule::warmup_stable_decay: {
      const double decay = schedule.decay_steps() > 0 ? static_cast<double>(schedule.decay_steps())
                                                      : std::max(1.0, std::floor(end / 10));
      const double left = std::clamp((end - s) / decay, 0.0, 1.0);
      const double final_rate = schedule.final_learning_rate();
      return std::min(peak * rise, final_rate + (peak - final_rate) * left);
    }
  }
  require(false, "a schedule of the schema");
  return 0;
}

}  // namespace birkhoff
