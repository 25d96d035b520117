// The speed of each rank: matrix products, memory bandwidth, and sums with other ranks. One slow
// rank slows all of them.
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>

#include "cluster/base/cpu.h"
#include "cluster/base/gpu/device.h"
#include "launcher/doctor/probes.h"
#include "launcher/failure.h"
#include "launcher/measure/report.h"

#ifdef BIRKHOFF_CUDA
#include "cluster/nccl_group.h"
#endif

namespace birkhoff {
namespace {

constexpr int kRounds = 5;  // of which the fastest counts: other load may use a host for a moment
constexpr double kRoundSeconds = 0.2;  // longer than the periods in which limits on CPU time count
constexpr int kMaxTurns = 8;

double seconds_since(double start) { return clock_seconds() - start; }

bool uses_gpu(const Subject& subject) {
  return subject.configuration && subject.configuration->device() == configs::Config::cuda;
}

at::Device device_of(const Subject& subject) {
  return uses_gpu(subject) ? cuda_device(subject.world.local_rank()) : at::Device(at::kCPU);
}

// Operations per second, in the fastest round.
double rate_of(at::Device device, const std::function<void()>& operation) {
  operation();  // the first one also allocates
  synchronize(device);
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const double start = clock_seconds();
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

// Calls `measure` on as many ranks of a host at a time as have separate cores, because ranks that
// share cores would measure each other. "cpu_share" is the share of that time in which its threads
// had CPUs. An error of one rank is thrown when all have had their turns. Collective over the
// world.
Facts measure_in_turns(const Subject& subject, const std::function<double()>& measure) {
  ProcessGroup& world = subject.world.group();
  const int local_size = subject.world.local_size();
  const int with_cores = std::max(1, usable_cores() / subject.threads);
  const int computing_threads = std::min(subject.threads, usable_cores());
  const int together = std::max(with_cores, (local_size + kMaxTurns - 1) / kMaxTurns);
  const std::int64_t turns = most_of_ranks(world, (local_size + together - 1) / together);
  double speed = 0, cpu_share = 1;
  std::exception_ptr error;
  for (std::int64_t turn = 0; turn < turns; ++turn) {
    world.barrier("doctor: turn");
    if (subject.world.local_rank() / together != turn) continue;
    try {
      const double start = clock_seconds();
      const double cpu_start = processor_seconds(CLOCK_PROCESS_CPUTIME_ID);
      speed = measure();
      cpu_share = (processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu_start) / seconds_since(start) /
                  computing_threads;
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
  Facts facts = {{"speed", speed}};
  if (!uses_gpu(subject)) facts["cpu_share"] = cpu_share;  // threads sleep while a GPU works
  return facts;
}

// The opponent of `player` in a round of a tournament of `size` players, an even number, in which
// everyone meets everyone else in size - 1 rounds (the circle method).
int opponent_of(int player, int size, int round) {
  const int last = size - 1;
  const auto opposite = [&](int other) { return (round - other + last) % last; };
  if (player < last) return opposite(player) == player ? last : opposite(player);
  int alone = 0;
  while (opposite(alone) != alone) ++alone;
  return alone;
}

// The number of ranks of a host that exchange at a time, the same for all hosts: as many as have
// separate cores on each, because ranks that share cores would measure each other, but more if they
// would need more than kMaxTurns turns. Collective over the world.
int ranks_with_cores(ProcessGroup& world, const std::vector<std::string>& host_of_rank) {
  const cpu_set_t mine = affinity_mask();
  const std::vector<std::string> masks = world.all_gather_bytes(
      std::string(reinterpret_cast<const char*>(&mine), sizeof mine), "doctor: cores");
  std::map<std::string, cpu_set_t> cores;
  std::map<std::string, int> ranks;
  for (std::size_t rank = 0; rank < masks.size(); ++rank) {
    cpu_set_t mask;
    std::memcpy(&mask, masks[rank].data(), sizeof mask);
    cpu_set_t& of_host = cores[host_of_rank[rank]];  // empty at first
    CPU_OR(&of_host, &of_host, &mask);
    ++ranks[host_of_rank[rank]];
  }
  int together = INT_MAX, most = 0;
  for (const auto& [host, count] : ranks) {
    const int cores_of_host = std::max(1, CPU_COUNT(&cores[host]));
    if (count > cores_of_host) together = std::min(together, cores_of_host);
    most = std::max(most, count);
  }
  // Pairs of one host have an even number of ranks.
  const int least = (most + kMaxTurns - 1) / kMaxTurns;
  return std::max(together, least + least % 2);
}

// Appends the pairs of `round` to `turns`, in as few turns as have at most `together` ranks of each
// host.
void add_turns(std::vector<std::vector<int>>& turns, const std::vector<int>& round,
               const std::vector<std::string>& host_of_rank, int together) {
  const std::size_t first = turns.size();
  std::vector<std::map<std::string, int>> ranks_of_host;  // of each turn
  for (std::size_t rank = 0; rank < round.size(); ++rank) {
    if (round[rank] < static_cast<int>(rank)) continue;  // no partner, or a pair that has its turn
    const auto partner = static_cast<std::size_t>(round[rank]);
    std::map<std::string, int> pair;
    ++pair[host_of_rank[rank]];
    ++pair[host_of_rank[partner]];
    std::size_t turn = 0;
    const auto has_room = [&](const auto& host) {
      return ranks_of_host[turn][host.first] + host.second <= together;
    };
    while (turn < ranks_of_host.size() && !std::all_of(pair.begin(), pair.end(), has_room)) ++turn;
    if (turn == ranks_of_host.size()) {
      ranks_of_host.emplace_back();
      turns.emplace_back(round.size(), -1);
    }
    for (const auto& [host, count] : pair) ranks_of_host[turn][host] += count;
    turns[first + turn][rank] = static_cast<int>(partner);
    turns[first + turn][partner] = static_cast<int>(rank);
  }
}

// GB/s of all-reduces of `sums`, zeros, by a pair of ranks. Collective over the pair.
double exchange_rate(std::unique_ptr<ProcessGroup> pair, const at::Tensor& sums) {
  const at::Device device = sums.device();
#ifdef BIRKHOFF_CUDA
  if (device.is_cuda()) pair = std::make_unique<NcclGroup>(*pair, device);
#endif
  const auto reduce = [&](std::int64_t times) {
    pair->barrier("doctor: exchange");
    const double start = clock_seconds();
    for (std::int64_t i = 0; i < times; ++i)
      pair->all_reduce(sums, ReduceOp::kSum, "doctor: exchange");
    synchronize(device);
    return seconds_since(start) / static_cast<double>(times);
  };
  reduce(1);
  const auto times = static_cast<std::int64_t>(kRoundSeconds / std::max(reduce(2), 1e-6));
  const at::Tensor agreed = at::empty({1}, sums.options().dtype(at::kLong))
                                .fill_(std::clamp<std::int64_t>(times, 1, 1000));
  pair->all_reduce(agreed, ReduceOp::kMin, "doctor: exchange");
  double seconds = reduce(agreed.item<std::int64_t>());
  seconds = std::min(seconds, reduce(agreed.item<std::int64_t>()));
  // With two ranks, each one sends and receives the bytes of the tensor.
  return 1e-9 * static_cast<double>(sums.nbytes()) / seconds;
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

std::vector<std::vector<int>> exchange_rounds(const std::vector<std::string>& host_of_rank,
                                              int ranks_of_host_together) {
  constexpr int kMaxRounds = 3;
  const auto num_ranks = static_cast<int>(host_of_rank.size());
  std::map<std::string, std::vector<int>> hosts;
  for (int rank = 0; rank < num_ranks; ++rank) {
    hosts[host_of_rank[static_cast<std::size_t>(rank)]].push_back(rank);
  }
  std::vector<std::vector<int>> players;  // hosts, or the ranks of the only one
  if (hosts.size() == 1) {
    for (int rank = 0; rank < num_ranks; ++rank) players.push_back({rank});
  } else {
    for (const auto& [name, ranks] : hosts) players.push_back(ranks);
  }
  std::size_t pairs = players.front().size();  // of two players
  for (const std::vector<int>& player : players) pairs = std::min(pairs, player.size());
  const auto size = static_cast<int>(players.size() + players.size() % 2);
  std::vector<std::vector<int>> rounds(static_cast<std::size_t>(std::min(kMaxRounds, size - 1)),
                                       std::vector<int>(host_of_rank.size(), -1));
  for (std::size_t round = 0; round < rounds.size(); ++round) {
    for (std::size_t player = 0; player < players.size(); ++player) {
      const auto opponent = static_cast<std::size_t>(
          opponent_of(static_cast<int>(player), size, static_cast<int>(round)));
      if (opponent == players.size()) continue;  // an odd number of players: one pauses
      for (std::size_t i = 0; i < pairs; ++i) {
        rounds[round][static_cast<std::size_t>(players[player][i])] = players[opponent][i];
      }
    }
  }
  std::vector<std::vector<int>> turns;
  for (const std::vector<int>& round : rounds) {
    add_turns(turns, round, host_of_rank, std::max(ranks_of_host_together, 2));
  }
  return turns;
}

// All-reduces of pairs, so that a slow network has a name. A rank's speed is its fastest pair's,
// because a slow partner slows both; for the same reason it fails only if all its pairs do.
Facts probe_exchange_speed(const Subject& subject) {
  constexpr std::int64_t kElements = std::int64_t{1} << 20;
  World& world = subject.world;
  at::Tensor sums;
  std::string device_type = "no device";
  std::exception_ptr error;
  try {
    const at::Device device = device_of(subject);
    sums = at::ones({kElements}, at::TensorOptions().dtype(at::kFloat).device(device)).zero_();
#ifdef BIRKHOFF_CUDA
    if (device.is_cuda()) {  // throws if NCCL cannot start
      const NcclGroup alone(*make_single_group(), device);
    }
#endif
    device_type = device.is_cuda() ? "a GPU" : "a CPU";
  } catch (...) {
    error = std::current_exception();
  }
  // If one rank cannot take part, its partners would wait for it.
  const std::vector<std::string> devices =
      world.group().all_gather_bytes(device_type, "doctor: devices");
  if (error) std::rethrow_exception(error);
  for (std::size_t rank = 1; rank < devices.size(); ++rank) {
    if (devices[rank] == devices[0]) continue;
    return {{"unmeasured", fmt::format("rank 0 computes on {}, and rank {} on {}", devices[0], rank,
                                       devices[rank])}};
  }
  const std::vector<std::string> hosts =
      world.group().all_gather_bytes(world.host(), "doctor: hosts");
  const auto mine = static_cast<std::size_t>(world.rank());
  const int together = ranks_with_cores(world.group(), hosts);
  double speed = 0;
  std::string failure;
  const std::vector<std::vector<int>> rounds = exchange_rounds(hosts, together);
  // All ranks split the world for every round before the first one: a rank that waits for a split
  // keeps a core, and one that waits for a barrier sleeps.
  std::vector<std::unique_ptr<ProcessGroup>> pairs;
  for (const std::vector<int>& partners : rounds) {
    const int first = partners[mine] < 0 ? world.rank() : std::min(world.rank(), partners[mine]);
    pairs.push_back(world.split(first, world.rank()));
  }
  for (std::size_t round = 0; round < rounds.size(); ++round) {
    world.group().barrier("doctor: exchange");
    const int partner = rounds[round][mine];
    if (partner < 0) continue;
    try {
      speed = std::max(speed, exchange_rate(std::move(pairs[round]), sums));
    } catch (...) {
      failure =
          fmt::format("with rank {} on {}: {}", partner, hosts[static_cast<std::size_t>(partner)],
                      describe_failure(std::current_exception()).what);
    }
  }
  if (speed == 0 && !failure.empty()) fail(ExitCode::kPeer, "exchange {}", failure);
  Facts facts = Facts::object();
  if (speed > 0) facts["speed"] = speed;
  if (!failure.empty()) facts["failure"] = failure;
  return facts;
}

Judgement judge_exchange_speed(const Answers& answers) {
  constexpr const char* kCure =
      "look at its network card and cable (ibstat, ethtool), and at what MPI or NCCL use "
      "(NCCL_DEBUG=INFO)";
  if (const Facts& facts = answers.front().facts; facts.contains("unmeasured")) {
    return {"",
            {{Verdict::kWarn,
              "",
              {},
              "not measured: " + facts.at("unmeasured").get<std::string>(),
              "give all ranks the same `device`, and fix what other checks find"}}};
  }
  Answers measured;
  for (const Answer& answer : answers) {
    if (answer.facts.contains("speed")) measured.push_back(answer);
  }
  if (measured.empty()) return {"no rank has a partner"};
  Judgement judgement = judge_speed(measured, "GB/s", kCure);
  for (const Answer& answer : measured) {
    if (!answer.facts.contains("failure")) continue;
    judgement.add(Verdict::kWarn,
                  "",  // its partner may be to blame
                  {answer.rank}, "exchange " + answer.facts.at("failure").get<std::string>(),
                  kCure);
  }
  return judgement;
}

}  // namespace birkhoff
