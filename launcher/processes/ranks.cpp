#include "launcher/processes/ranks.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "launcher/app.h"
#include "launcher/failure.h"

namespace birkhoff {
namespace {

// Reads the variable as OpenMP does: a number, or a list with one number per nesting level. Values
// that OpenMP would ignore are errors.
std::optional<int> threads_asked_for() {
  const char* set = std::getenv("OMP_NUM_THREADS");
  if (set == nullptr || *set == '\0') return std::nullopt;
  const std::string_view text = set;
  int threads = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
  const bool complete = end == text.data() + text.size() || *end == ',';
  if (error == std::errc() && complete && threads > 0) {
    check_threads("OMP_NUM_THREADS", threads, ExitCode::kUsage);
    return threads;
  }
  fail(ExitCode::kUsage,
       "OMP_NUM_THREADS is '{}': set it to a number of threads, at least 1, or unset it", text);
}

// Ends all ranks with the code of this rank's error, because other ranks may wait in a collective
// that this rank will never join. Often all ranks find the same error: rank 0 reports it at once,
// and the other ranks give it time to end them.
[[noreturn]] void end_world(World& world, const Failure& failure, std::ostream& err) {
  if (world.rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(1));
  err << "birkhoff: " << (world.rank() == 0 ? "" : "rank " + std::to_string(world.rank()) + ": ")
      << failure.what << std::endl;
  world.abort(static_cast<int>(failure.code));
}

// Ranks of different builds would compute different results or misread each other's data.
// Collective.
void check_same_program(World& world) {
  const std::string mine = program_hash() + '\n' + version_text();
  const std::vector<std::string> all = world.group().all_gather_bytes(mine, "program");
  for (int rank = 1; rank < world.size(); ++rank) {
    const std::string& other = all[static_cast<std::size_t>(rank)];
    if (other == all[0]) continue;
    std::istringstream lines(other), lines_0(all[0]);
    std::string line, line_0, difference;
    while (std::getline(lines, line) && std::getline(lines_0, line_0)) {
      if (line == line_0) continue;
      difference += (difference.empty() ? "" : "; ") + line + " instead of " + line_0;
    }
    fail(ExitCode::kUsage,
         "rank {} runs a different program than rank 0 (hash of its file, versions it was built "
         "with): {}; install the same build of birkhoff on all machines",
         rank, difference);
  }
}

}  // namespace

void check_threads(const char* what, int threads, ExitCode code) {
  constexpr int kMaxPerCore = 64;
  const int most = kMaxPerCore * machine_cores();
  if (threads <= most) return;
  fail(code, "{} is {}, more than {} for each of this machine's {} cores: set it to at most {}",
       what, threads, kMaxPerCore, machine_cores(), most);
}

int threads_of_rank(int cores) { return threads_asked_for().value_or(cores); }

int ranks_to_run_on(std::optional<int> asked) {
  const int announced = announced_ranks();
  if (asked && announced > 1) {
    fail(ExitCode::kUsage,
         "--ranks {} inside a world of {} ranks that mpirun or srun has started: leave --ranks out",
         *asked, announced);
  }
  if (asked && std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr) {
    fail(ExitCode::kUsage,
         "--ranks {} in a process that mpirun has started: leave --ranks or mpirun out", *asked);
  }
  return asked.value_or(announced);
}

void check_before_ranks(const std::function<void()>& check) {
  try {
    threads_asked_for();
    check();
  } catch (const Error&) {
    // Every rank finds the same error. Rank 0 reports it; the other ranks wait a moment for mpirun
    // to end them, and report it only if rank 0 did not find it (a file is missing on their
    // machine).
    if (announced_rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(2));
    throw;
  }
}

std::string program_hash() {
  File file = File::open_for_read("/proc/self/exe");
  Xxh3Hasher hasher;
  std::vector<char> buffer(std::size_t{1} << 20);
  while (const std::size_t num_read = file.read_some(buffer.data(), buffer.size())) {
    hasher.update(buffer.data(), num_read);
  }
  return hasher.hex_digest();
}

int run_in_any_world(const std::function<int(World&)>& run, std::ostream& err) {
  World world;
  try {
    return run(world);
  } catch (...) {
    if (world.size() == 1) throw;
    end_world(world, describe_failure(std::current_exception()), err);
  }
}

int run_in_world(const std::function<int(World&)>& run, std::ostream& err) {
  return run_in_any_world(
      [&](World& world) {
        check_same_program(world);
        return run(world);
      },
      err);
}

}  // namespace birkhoff
