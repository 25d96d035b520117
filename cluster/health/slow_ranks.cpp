#include "cluster/health/slow_ranks.h"

#include <fmt/format.h>

#include <algorithm>

namespace birkhoff {
namespace {

struct PhaseTime {
  const char* name;
  double StepTimes::*seconds;
};
constexpr PhaseTime kPhases[] = {{"reading data", &StepTimes::data},
                                 {"the forward and backward passes", &StepTimes::passes},
                                 {"the update", &StepTimes::update}};

// The lower one of two middle values: with two ranks, a mean would contain half of the slow one's
// time.
double median_of(std::vector<double> values) {
  const auto middle = values.begin() + (std::ssize(values) - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

std::string SlowRank::text() const {
  return fmt::format(
      "rank {} on {} is slow: it takes {:.1f} ms for a step without waiting for others, {:.0f} % "
      "more than the usual {:.1f} ms, most of it in {}",
      rank, host, 1000 * seconds, 100 * (seconds / usual - 1), 1000 * usual, phase);
}

// The median of time(StepTimes) over the ranks.
template <typename Time>
double SlowRanks::usual(const RankStatus& judged, Time time) const {
  std::vector<double> times;
  for (const Rank& rank : ranks_) {
    const RankStatus& status = *rank.status;
    if (status.sequences == 0) continue;
    const double share =
        static_cast<double>(judged.sequences) / static_cast<double>(status.sequences);
    times.push_back(time(status.step_times) * std::max(1.0, share));
  }
  return median_of(times);
}

std::vector<SlowRank> SlowRanks::find(double now) {
  const bool all_known = std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return rank.status && rank.status->num_timed >= kSteps;
  });
  if (!all_known) return {};
  std::vector<SlowRank> found;
  for (Rank& rank : ranks_) {
    const RankStatus& status = *rank.status;
    if (status.sequences == 0) continue;
    const double busy = status.step_times.busy();
    const double usual_busy = usual(status, [](const StepTimes& t) { return t.busy(); });
    if (busy > kSlower * usual_busy && busy > usual_busy + kMinSeconds) {
      rank.last_slow = status.num_timed;
      if (!rank.slow_from) {
        rank.slow_from = status.num_timed;
        rank.since = now;
      }
    } else if (!rank.named || status.num_timed - rank.last_slow >= kSteps) {
      rank.slow_from.reset();
      rank.named = false;
    }
    if (!rank.slow_from || rank.named || status.num_timed - *rank.slow_from < kSteps ||
        now - rank.since < kMinDuration) {
      continue;
    }
    rank.named = true;
    found.push_back(describe(status));
  }
  return found;
}

SlowRank SlowRanks::describe(const RankStatus& status) const {
  SlowRank slow{.rank = status.rank,
                .host = status.host.data(),
                .step = status.step,
                .phase = "",
                .seconds = status.step_times.busy(),
                .usual = usual(status, [](const StepTimes& t) { return t.busy(); })};
  double most = 0;
  for (const PhaseTime& phase : kPhases) {
    const double excess = status.step_times.*phase.seconds -
                          usual(status, [&](const StepTimes& t) { return t.*phase.seconds; });
    if (slow.phase.empty() || excess > most) {
      slow.phase = phase.name;
      most = excess;
    }
  }
  return slow;
}

}  // namespace birkhoff
