#include "launcher/plan/effective_time.h"

#include <cmath>
#include <limits>

namespace birkhoff {

double FaultModel::seconds_between_faults() const {
  constexpr double kDay = 86400;
  return faults_per_day > 0 ? kDay / faults_per_day : std::numeric_limits<double>::infinity();
}

EffectiveTime effective_time(const FaultModel& faults, double interval_seconds) {
  const double between = faults.seconds_between_faults();
  const double segment = interval_seconds + faults.save_seconds;
  EffectiveTime share;
  if (std::isinf(between)) {
    share.steps = interval_seconds / segment;
    share.saves = faults.save_seconds / segment;
    return share;
  }
  share.restarts = -std::expm1(-faults.restart_seconds / between);
  share.steps = (1 - share.restarts) * interval_seconds / (between * std::expm1(segment / between));
  share.saves = share.steps * faults.save_seconds / interval_seconds;
  share.lost = 1 - share.steps - share.saves - share.restarts;
  return share;
}

double lost_seconds_per_fault(const FaultModel& faults, double interval_seconds) {
  const double between = faults.seconds_between_faults();
  if (std::isinf(between)) return 0;
  const double segment = interval_seconds + faults.save_seconds;
  return between - segment / std::expm1(segment / between);
}

double best_interval_seconds(const FaultModel& faults) {
  const double between = faults.seconds_between_faults(), save = faults.save_seconds;
  if (std::isinf(between)) return between;
  if (save >= 2 * between) return between;
  const double ratio = save / (2 * between);
  return std::sqrt(2 * save * between) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - save;
}

}  // namespace birkhoff
