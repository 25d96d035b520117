// A program whose ranks exchange sums step by step under the watchdog, as in training, until one
// rank fails: hanging_ranks MODE VICTIM STEP SECONDS. At step STEP, rank VICTIM
//   skip   leaves out one all_reduce that the others join
//   die    is killed between the start of an all_reduce and its end
// and writes "harm at N". N is the steady clock in nanoseconds, which all processes of a machine
// share. SECONDS is the watchdog's limit.
#include <ATen/ops/ones.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include "cluster/health/heartbeat.h"

int main(int argc, char** argv) {
  using namespace birkhoff;
  if (argc != 5) return 2;
  const std::string mode = argv[1];
  if (mode != "skip" && mode != "die") return 2;
  const int victim = std::atoi(argv[2]);
  const std::int64_t harm_step = std::atoll(argv[3]);
  std::signal(SIGTERM, SIG_IGN);  // as in training, where it is a request to stop
  World world;
  Activity activity;
  const auto group = world.split(0, world.rank());
  const Heartbeat heartbeat(
      world.group(), {std::atof(argv[4]), 4, 900},
      [&] {
        return make_status(world, activity, {&world.group(), group.get()});
      },
      [&](const Diagnosis& diagnosis) {
        std::cerr << "birkhoff: " << diagnosis.text << std::endl;
        world.abort(static_cast<int>(diagnosis.code));
      });
  for (std::int64_t step = 1;; ++step) {
    activity.enter(Phase::kStep, step);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const bool harm = world.rank() == victim && step == harm_step;
    if (harm) {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      std::cerr << "harm at " << std::chrono::nanoseconds(now).count() << std::endl;
    }
    // Too long for a message that is delivered before its receiver asks for it: a rank that dies
    // here has not given the others what they need.
    const at::Tensor gradients = at::ones({50000});
    if (!(harm && mode == "skip")) {
      const auto work = group->all_reduce_async(gradients, ReduceOp::kSum, "gradients");
      if (harm) std::raise(SIGKILL);
      work->wait();
      if (gradients[0].item<float>() != static_cast<float>(world.size())) {
        std::cerr << "wrong sum\n";
        world.abort(1);
      }
    }
    group->all_reduce(at::ones({5000}), ReduceOp::kSum, "counts");
  }
}
