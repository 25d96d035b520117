// Checks of the hosts: names, cores and threads, limits, clocks, the network, and the files that
// share memory.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <stop_token>
#include <string_view>
#include <thread>

#include "cluster/base/cpu.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "cluster/health/connection.h"
#include "launcher/doctor/probes.h"
#include "launcher/measure/report.h"
#include "runtime/reporting/run_history.h"

namespace birkhoff {
namespace {

constexpr double kMebibyte = 1 << 20;

// Cores that this process may use.
std::vector<int> own_cores() {
  const cpu_set_t mask = affinity_mask();
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) cores.push_back(core);
  }
  return cores;
}

// Variables that ask the launcher to bind ranks to cores: " (NAME is VALUE)" for each.
std::string binding_variables() {
  std::string text;
  for (const char* name : {"SLURM_CPU_BIND", "OMPI_MCA_hwloc_base_binding_policy"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || std::string_view(value).find("none") != std::string_view::npos)
      continue;
    text += fmt::format(" ({} is {})", name, value);
  }
  return text;
}

// -1: unlimited.
std::int64_t soft_limit(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) return -1;
  return limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<std::int64_t>(limit.rlim_cur);
}

std::string folder_from(std::initializer_list<const char*> variables, const char* otherwise) {
  for (const char* name : variables) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') return value;
  }
  return otherwise;
}

}  // namespace

// ---- Hosts

Facts probe_hosts(const Subject&) {
  // Differs between machines, and is the same in all containers of one.
  return {{"boot", read_file("/proc/sys/kernel/random/boot_id", 4096)}};
}

Judgement judge_hosts(const Answers& answers) {
  std::set<std::string> machines;
  for (const Answer& answer : answers) machines.insert(answer.facts.at("boot"));
  const std::vector<Answers> hosts = by_host(answers);
  std::vector<std::string> names;
  for (const Answers& host : hosts) names.push_back(host.front().host);
  Judgement judgement{fmt::format("{}: {}", counted(hosts.size(), "host"), fmt::join(names, ", "))};
  for (const Answers& host : hosts) {
    std::vector<int> others;  // on a machine other than the host's first rank's
    for (const Answer& answer : host) {
      if (answer.facts.at("boot") != host.front().facts.at("boot")) others.push_back(answer.rank);
    }
    if (others.empty()) continue;
    judgement.add(
        Verdict::kFail, host.front().host, others,
        fmt::format("rank {} is on another machine with the same name", host.front().rank),
        "give each machine its own host name: messages and exclude lists name hosts");
  }
  return judgement;
}

// ---- Threads

Facts probe_threads(const Subject& subject) {
  return {{"threads", subject.threads}, {"cores", own_cores()}, {"binding", binding_variables()}};
}

Judgement judge_threads(const Answers& answers) {
  Judgement judgement;
  for (const Answers& host : by_host(answers)) {
    const std::string binding = host.front().facts.value("binding", "");
    std::set<int> cores;
    int threads = 0;
    bool a_rank_has_too_many = false;
    for (const Answer& answer : host) {
      const auto own = answer.facts.at("cores").get<std::set<int>>();
      const int its = answer.facts.at("threads").get<int>();
      cores.insert(own.begin(), own.end());
      threads += its;
      if (its <= static_cast<int>(own.size())) continue;
      a_rank_has_too_many = true;
      judgement.add(
          Verdict::kWarn, answer,
          fmt::format("{} on {}{}", counted(its, "thread"), counted(own.size(), "core"), binding),
          "set OMP_NUM_THREADS to the number of cores of a rank");
    }
    if (threads > static_cast<int>(cores.size()) && !a_rank_has_too_many) {
      judgement.add(
          Verdict::kWarn, host.front().host, {},
          fmt::format("{} with {} share {}{}", counted(host.size(), "rank"),
                      counted(threads, "thread"), counted(cores.size(), "core"), binding),
          "start fewer ranks there, or give each its own cores (srun --cpus-per-task, mpirun "
          "--map-by)");
    }
    judgement.summary += fmt::format("{}{} on {}", judgement.summary.empty() ? "" : "; ",
                                     counted(threads, "thread"), counted(cores.size(), "core"));
  }
  return judgement;
}

// ---- Limits

Facts probe_limits(const Subject& subject) {
  const std::string devices = "/sys/class/infiniband";
  const bool infiniband = is_directory(devices) && !list_directory(devices).empty();
  return {{"ranks", subject.world.size()},
          {"open_files", soft_limit(RLIMIT_NOFILE)},
          {"locked_bytes", soft_limit(RLIMIT_MEMLOCK)},
          {"address_bytes", soft_limit(RLIMIT_AS)},
          {"core_bytes", soft_limit(RLIMIT_CORE)},
          {"infiniband", infiniband}};
}

Judgement judge_limits(const Answers& answers) {
  constexpr std::int64_t kFiles = 256, kFilesOfRank = 2;
  Judgement judgement{"open files, locked memory, address space"};
  const auto warn = [&](const Answer& answer, const std::string& found, const std::string& cure) {
    judgement.add(Verdict::kWarn, answer, found, cure);
  };
  for (const Answer& answer : answers) {
    const auto limit = [&](const char* name) { return answer.facts.at(name).get<std::int64_t>(); };
    const std::int64_t files = kFiles + kFilesOfRank * limit("ranks");
    if (limit("open_files") >= 0 && limit("open_files") < files) {
      warn(answer,
           fmt::format("{} open files are allowed, and {} may be needed", limit("open_files"),
                       files),
           fmt::format("ulimit -n {}", files));
    }
    if (answer.facts.at("infiniband").get<bool>() && limit("locked_bytes") >= 0) {
      warn(answer,
           fmt::format("InfiniBand, but only {} bytes may be locked", limit("locked_bytes")),
           "ulimit -l unlimited (in Slurm: PropagateResourceLimitsExcept=MEMLOCK)");
    }
    if (limit("address_bytes") >= 0) {
      warn(answer, fmt::format("the address space is limited to {} bytes", limit("address_bytes")),
           "ulimit -v unlimited: GPUs and memory-mapped files need more than they use");
    }
    if (limit("core_bytes") != 0 && answer.rank > 0 &&
        limit("core_bytes") != answers.front().facts.at("core_bytes").get<std::int64_t>()) {
      warn(answer, "the limit of core files differs from rank 0's",
           "set the same ulimit -c on all hosts");
    }
  }
  return judgement;
}

// ---- Clock

Facts probe_clock(const Subject& subject) {
  // Right after a barrier all ranks read their clocks at nearly the same time.
  constexpr int kReadings = 3;
  std::vector<double> readings;
  for (int i = 0; i < kReadings; ++i) {
    subject.world.group().barrier("doctor: clock");
    readings.push_back(unix_seconds());
  }
  return {{"readings", readings}};
}

Judgement judge_clock(const Answers& answers) {
  constexpr double kWarnSeconds = 1, kFailSeconds = 60;
  std::vector<std::vector<double>> readings;
  for (const Answer& answer : answers) readings.push_back(answer.facts.at("readings"));
  std::vector<std::vector<double>> ahead(answers.size());  // of the usual clock, at each reading
  for (std::size_t i = 0; i < readings.front().size(); ++i) {
    std::vector<double> all;
    for (const auto& of_rank : readings) all.push_back(of_rank.at(i));
    const double usual = median(all);
    for (std::size_t r = 0; r < answers.size(); ++r) ahead[r].push_back(readings[r][i] - usual);
  }
  std::vector<double> seconds;
  for (const std::vector<double>& of_rank : ahead) seconds.push_back(median(of_rank));
  const auto [earliest, latest] = std::minmax_element(seconds.begin(), seconds.end());
  const double most = *latest - *earliest;
  Judgement judgement{fmt::format("clocks agree to {:.3f} s", most)};
  const auto find = [&](double difference, const std::string& host, const std::vector<int>& ranks,
                        const std::string& found) {
    judgement.add(
        difference < kFailSeconds ? Verdict::kWarn : Verdict::kFail, host, ranks, found,
        "synchronize clocks (chronyc makestep): ages of files and times in logs are wrong");
  };
  const auto is_usual = [](double its) { return std::abs(its) < kWarnSeconds; };
  if (2 * std::count_if(seconds.begin(), seconds.end(), is_usual) <= std::ssize(seconds)) {
    // No time has a majority of the ranks: any clock may be the right one.
    const auto host = [&](auto its) -> const std::string& {
      return answers[static_cast<std::size_t>(its - seconds.begin())].host;
    };
    find(most, "", {},
         fmt::format("the clock of {} is {:.0f} s ahead of {}'s; neither has a majority",
                     host(latest), most, host(earliest)));
    return judgement;
  }
  for (std::size_t r = 0; r < answers.size(); ++r) {
    if (is_usual(seconds[r])) continue;
    const double difference = std::abs(seconds[r]);
    find(difference, answers[r].host, {answers[r].rank},
         fmt::format("the clock is {:.0f} s {}", difference, seconds[r] > 0 ? "ahead" : "behind"));
  }
  return judgement;
}

// ---- Network

// Sends a word to each peer that connects.
class Greeter {
 public:
  Greeter(Socket listener, std::string word)
      : listener_(std::move(listener)),
        word_(std::move(word)),
        thread_([this](const std::stop_token& stop) { greet(stop); }) {}

 private:
  void greet(const std::stop_token& stop) const {
    constexpr int kPollMs = 100;
    while (!stop.stop_requested() && listener_) {
      wait_readable({listener_.get()}, kPollMs);
      while (const Socket guest{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)}) {
        ::send(guest.get(), word_.data(), word_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      }
    }
  }

  const Socket listener_;
  const std::string word_;
  std::jthread thread_;
};

// Whether the word arrives within `ms` milliseconds.
bool is_greeted(const Socket& socket, const std::string& word, int ms) {
  using Clock = std::chrono::steady_clock;
  const auto give_up = Clock::now() + std::chrono::milliseconds(ms);
  std::string heard(word.size(), '\0');
  std::size_t num_heard = 0;
  while (num_heard < word.size() && Clock::now() < give_up) {
    constexpr int kPollMs = 100;
    wait_readable({socket.get()}, kPollMs);
    const ssize_t received =
        ::recv(socket.get(), heard.data() + num_heard, word.size() - num_heard, MSG_DONTWAIT);
    if (received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (received > 0) num_heard += static_cast<std::size_t>(received);
  }
  return heard == word;
}

// As the heartbeat does, all ranks connect to rank 0. Another program may listen at an address that
// hosts have in common, such as loopback: the word identifies rank 0.
Facts probe_network(const Subject& subject) {
  constexpr int kConnectMs = 2000;
  ProcessGroup& world = subject.world.group();
  std::optional<Greeter> greeter;
  std::string offer;
  if (world.rank() == 0) {
    std::uint16_t port = 0;
    Socket listener = listen_anywhere(port);
    std::random_device random;
    const std::string word = fmt::format("{:08x}{:08x}{:08x}", random(), random(), random());
    offer = fmt::format("{} {} {}", word, port, fmt::join(own_addresses(), " "));
    greeter.emplace(std::move(listener), word);
  }
  std::istringstream words(world.broadcast_bytes(offer, 0, "doctor: address of rank 0"));
  std::string word, port, reached;
  words >> word >> port;
  for (std::string address; reached.empty() && words >> address;) {
    const Socket socket = connect_to(address, port, kConnectMs);
    if (socket && is_greeted(socket, word, kConnectMs)) reached = address;
  }
  world.barrier("doctor: all have tried to connect");
  return {{"port", port}, {"reached", reached}};
}

Judgement judge_network(const Answers& answers) {
  Judgement judgement{"all ranks reach rank 0 by TCP"};
  for (const Answer& answer : answers) {
    if (!answer.facts.at("reached").get<std::string>().empty()) continue;
    judgement.add(
        Verdict::kWarn, answer,
        fmt::format("no TCP connection to rank 0 on {} (its port {})", answers.front().host,
                    answer.facts.at("port").get<std::string>()),
        "open the firewall between the hosts: without it the watchdog does not see this rank");
  }
  return judgement;
}

// ---- Files that share memory

Facts probe_memory_files(const Subject& subject) {
  // The folders where Open MPI's ranks of a machine exchange messages and keep other files.
  const std::string memory = folder_from({"OMPI_MCA_btl_vader_backing_directory"}, "/dev/shm"),
                    other = folder_from({"OMPI_MCA_orte_tmpdir_base", "TMPDIR"}, "/tmp");
  return {{"ranks", subject.world.local_size()},
          {"memory", memory},
          {"memory_bytes", free_bytes(memory)},
          {"other", other},
          {"other_bytes", free_bytes(other)}};
}

Judgement judge_memory_files(const Answers& answers) {
  constexpr double kMemoryOfRank = 64 * kMebibyte, kOther = 64 * kMebibyte, kNothing = kMebibyte;
  Judgement judgement;
  for (const Answer& answer : answers) {
    const int ranks = answer.facts.at("ranks").get<int>();
    const auto compare = [&](const char* folder, const char* bytes, double needed) {
      const double free = answer.facts.at(bytes).get<double>();
      const std::string name = answer.facts.at(folder).get<std::string>();
      judgement.summary += fmt::format(
          "{}{:.0f} MiB free in {}", judgement.summary.empty() ? "" : "; ", free / kMebibyte, name);
      if (free >= needed) return;
      judgement.add(
          free < kNothing ? Verdict::kFail : Verdict::kWarn, answer.host, {},
          fmt::format("{:.1f} MiB are free in {}, and {} may need {:.0f}", free / kMebibyte, name,
                      counted(ranks, "rank"), needed / kMebibyte),
          fmt::format("remove files that ended jobs left in {}, or enlarge it (containers: "
                      "--shm-size)",
                      name));
    };
    compare("memory", "memory_bytes", ranks * kMemoryOfRank);
    if (answer.facts.at("other") != answer.facts.at("memory")) {
      compare("other", "other_bytes", kOther);
    }
  }
  return judgement;
}

}  // namespace birkhoff
