// How fast each rank is: at products of matrices, at moving memory, and at summing with others. One
// slow rank slows all of them.
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <exception>
#include <functional>
#include <memory>

#include "cluster/base/cpu.h"
#include "cluster/base/gpu/device.h"
#include "launcher/doctor/probes.h"

#ifdef BIRKHOFF_CUDA
#include "cluster/nccl_group.h"
#endif

namespace birkhoff {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;  // of which the fastest counts: others may use a host for a moment
constexpr double kRoundSeconds = 0.2;  // longer than the periods in which limits on CPU time count
constexpr int kMostTurns = 8;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

at::Device device_of(const Subject& subject) {
  const bool cuda =
      subject.configuration && subject.configuration->device() == configs::Config::cuda;
  return cuda ? cuda_device(subject.world.local_rank()) : at::Device(at::kCPU);
}

// Seconds of CPU time of all threads of this process.
double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// How often per second `operation` is done, in the fastest round.
double rate_of(at::Device device, const std::function<void()>& operation) {
  operation();  // the first one also allocates
  synchronize(device);
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const Clock::time_point start = Clock::now();
    int done = 0;
    do {
      operation();
      synchronize(device);
      ++done;
    } while (seconds_since(start) < kRoundSeconds);
    best = std::max(best, done / seconds_since(start));
  }
  return best;
}

std::int64_t most_of_ranks(ProcessGroup& world, std::int64_t mine) {
  const at::Tensor most = at::empty({1}, at::kLong).fill_(mine);
  world.all_reduce(most, ReduceOp::kMax, "doctor: speed");
  return most.item<std::int64_t>();
}

// Calls `measure` on as many ranks of a host at a time as have cores of their own, because ranks
// that share cores would measure each other. An error of one rank is thrown when all have had their
// turns. Collective over the world.
Facts measure_in_turns(const Subject& subject, const std::function<double()>& measure) {
  ProcessGroup& world = subject.world.group();
  const int local_size = subject.world.local_size();
  const int with_cores = std::max(1, usable_cores() / subject.threads);
  const int together = std::max(with_cores, (local_size + kMostTurns - 1) / kMostTurns);
  const std::int64_t turns = most_of_ranks(world, (local_size + together - 1) / together);
  double speed = 0, cpu_share = 1;
  std::exception_ptr error;
  for (std::int64_t turn = 0; turn < turns; ++turn) {
    world.barrier("doctor: turn");
    if (subject.world.local_rank() / together != turn) continue;
    try {
      const Clock::time_point start = Clock::now();
      const double cpu_start = cpu_seconds();
      speed = measure();
      cpu_share = (cpu_seconds() - cpu_start) / seconds_since(start);
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
  return {{"speed", speed}, {"cpu_share", cpu_share}};
}

// The partner of `rank` in a round of a tournament of `size` players, an even number, in which all
// meet all in size - 1 rounds (the circle method).
int partner_of(int rank, int size, int round) {
  const int last = size - 1;
  const auto opposite = [&](int player) { return (round - player + last) % last; };
  if (rank < last) return opposite(rank) == rank ? last : opposite(rank);
  int player = 0;
  while (opposite(player) != player) ++player;
  return player;
}

}  // namespace

Facts probe_matrix_speed(const Subject& subject) {
  return measure_in_turns(subject, [&] {
    const at::Device device = device_of(subject);
    const std::int64_t n = device.is_cuda() ? 4096 : 512;
    const auto options =
        at::TensorOptions().dtype(device.is_cuda() ? at::kBFloat16 : at::kFloat).device(device);
    const at::Tensor a = at::ones({n, n}, options), b = at::ones({n, n}, options);
    at::Tensor product = at::empty({n, n}, options);
    const auto flops = 2e-9 * static_cast<double>(n * n * n);
    return flops * rate_of(device, [&] { at::mm_out(product, a, b); });
  });
}

Judgement judge_matrix_speed(const Answers& answers) {
  return judge_speed(
      answers, "GFLOP/s",
      "look for other processes, a CPU limit, or clocks that heat or power hold down");
}

Facts probe_memory_speed(const Subject& subject) {
  return measure_in_turns(subject, [&] {
    const at::Device device = device_of(subject);
    constexpr std::int64_t kBytes = std::int64_t{64} << 20;  // more than caches hold
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    const at::Tensor from = at::ones({kBytes}, options);
    at::Tensor to = at::ones({kBytes}, options);
    return 2e-9 * static_cast<double>(kBytes) * rate_of(device, [&] { to.copy_(from); });
  });
}

Judgement judge_memory_speed(const Answers& answers) {
  return judge_speed(
      answers, "GB/s",
      "look for other processes, memory on another socket, or missing memory modules");
}

// All-reduces of pairs, so that a slow network has a name. A rank's speed is that of its fastest
// pair, because a slow partner slows both.
Facts probe_exchange_speed(const Subject& subject) {
  constexpr std::int64_t kElements = std::int64_t{1} << 20;
  constexpr int kPairs = 3;
  World& world = subject.world;
  const int players = world.size() + world.size() % 2;
  const at::Device device = device_of(subject);
  double speed = 0;
  for (int round = 0; round < std::min(kPairs, players - 1); ++round) {
    const int partner = partner_of(world.rank(), players, round);
    const bool alone = partner >= world.size();
    std::unique_ptr<ProcessGroup> pair =
        world.split(alone ? world.rank() : std::min(world.rank(), partner), world.rank());
#ifdef BIRKHOFF_CUDA
    if (device.is_cuda() && !alone) pair = std::make_unique<NcclGroup>(*pair, device);
#endif
    if (alone) continue;
    const at::Tensor sums =
        at::ones({kElements}, at::TensorOptions().dtype(at::kFloat).device(device)).zero_();
    const auto reduce = [&](std::int64_t times) {
      pair->barrier("doctor: exchange");
      const Clock::time_point start = Clock::now();
      for (std::int64_t i = 0; i < times; ++i)
        pair->all_reduce(sums, ReduceOp::kSum, "doctor: exchange");
      synchronize(device);
      return seconds_since(start) / static_cast<double>(times);
    };
    reduce(1);
    const auto times = static_cast<std::int64_t>(kRoundSeconds / std::max(reduce(2), 1e-6));
    const at::Tensor agreed = at::empty({1}, at::TensorOptions().dtype(at::kLong).device(device))
                                  .fill_(std::clamp<std::int64_t>(times, 1, 1000));
    pair->all_reduce(agreed, ReduceOp::kMin, "doctor: exchange");
    // For two ranks, the bytes that each one sends and receives are those of the tensor.
    const double gigabytes = 1e-9 * static_cast<double>(sums.nbytes());
    for (int repetition = 0; repetition < 2; ++repetition) {
      speed = std::max(speed, gigabytes / reduce(agreed.item<std::int64_t>()));
    }
  }
  return {{"speed", speed}};
}

Judgement judge_exchange_speed(const Answers& answers) {
  if (answers.size() == 1) return {"one rank exchanges nothing"};
  return judge_speed(
      answers, "GB/s",
      "look at its network card and cable (ibstat, ethtool), and at what MPI or NCCL use "
      "(NCCL_DEBUG=INFO)");
}

}  // namespace birkhoff
