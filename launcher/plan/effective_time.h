// The share of a job's time that is spent in steps that count, if it saves periodically and faults
// throw it back to its last save: the model of Daly 2006, "A higher order estimate of the optimum
// checkpoint interval for restart dumps", section 2. Faults occur at random, at a constant rate,
// also during saves and restarts. docs/plan.md writes the formulas out. Local.
#pragma once

namespace birkhoff {

struct FaultModel {
  double faults_per_day = 0;   // of the whole job; 0: none
  double save_seconds = 0;     // time that a save stalls training
  double restart_seconds = 0;  // from a fault to the first step after it

  // Mean time between faults; infinite if there are none.
  double seconds_between_faults() const;
};

// Shares of the time, which add up to 1.
struct EffectiveTime {
  double steps = 1;  // in steps that count
  double saves = 0;
  double lost = 0;  // steps and saves between the last save and a fault
  double restarts = 0;
};

// interval_seconds: time in steps from one save to the next, above 0.
EffectiveTime effective_time(const FaultModel& faults, double interval_seconds);

// Time in steps from a save to a fault that interrupts them, on average.
double lost_seconds_per_fault(const FaultModel& faults, double interval_seconds);

// The interval with the largest share of steps that count, by Daly's equation 37, which is within a
// thousandth of the best share; the square root in it is Young's estimate (Young 1974). Infinite
// without faults, 0 if a save costs nothing.
double best_interval_seconds(const FaultModel& faults);

}  // namespace birkhoff
