#include "launcher/bench/other_load.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "cluster/base/cpu.h"

namespace birkhoff {
namespace {

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

double own_seconds() {
  double seconds = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    getrusage(who, &usage);
    seconds += seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
  }
  return seconds;
}

// Totals since the machine's start; zeros if the system does not report them.
ProcessorSeconds processor_seconds_so_far() {
  const double tick = 1 / static_cast<double>(sysconf(_SC_CLK_TCK));
  ProcessorSeconds sum;
  std::ifstream stat("/proc/stat");
  std::string line;
  while (std::getline(stat, line)) {
    std::istringstream words(line);
    std::string name;
    // See proc(5). Guest time is part of user and nice time.
    double user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, softirq = 0, steal = 0;
    words >> name >> user >> nice >> system >> idle >> wait >> irq >> softirq >> steal;
    if (name != "cpu") continue;  // "cpu" sums all CPUs
    sum.busy = tick * (user + nice + system + irq + softirq);
    sum.stolen = tick * steal;
    sum.all = sum.busy + sum.stolen + tick * (idle + wait);
  }
  sum.own = own_seconds();
  return sum;
}

}  // namespace

void OtherLoad::begin() { start_ = processor_seconds_so_far(); }

void OtherLoad::end() {
  const ProcessorSeconds now = processor_seconds_so_far();
  counted_.all += now.all - start_.all;
  counted_.busy += now.busy - start_.busy;
  counted_.stolen += now.stolen - start_.stolen;
  counted_.own += now.own - start_.own;
}

std::string OtherLoad::note() const { return other_load_note(counted_, machine_cores()); }

std::string other_load_note(const ProcessorSeconds& counted, int processors) {
  // The system counts in ticks of 10 ms: a few of them are not a measurement.
  constexpr double kFewTicks = 0.1, kQuietShare = 0.05, kQuietProcessors = 0.5;
  const double others = std::max(0.0, counted.busy - counted.own) + counted.stolen;
  if (others < kFewTicks) return "";
  const auto in_processors = [&](double seconds) { return seconds / counted.all * processors; };
  const double taken = in_processors(others);
  if (taken < std::min(kQuietShare * processors, kQuietProcessors)) return "";
  return fmt::format(
      "\nThe machine was not quiet: during the measurement, other processes used {:.1f} of {} "
      "CPUs{}.\n",
      taken, processors,
      counted.stolen < kFewTicks
          ? ""
          : fmt::format(" ({:.1f} by other virtual machines)", in_processors(counted.stolen)));
}

}  // namespace birkhoff
