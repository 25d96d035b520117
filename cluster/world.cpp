#include "cluster/world.h"

#include <mpi.h>
#include <sys/uio.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/text/number_text.h"
#include "cluster/mpi_group.h"
#include "cluster/slurm_environment.h"

namespace birkhoff {
namespace {

// The value of the first of these environment variables that holds a number.
std::optional<int> environment_number(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    if (value == nullptr) continue;
    if (const std::optional<int> number = parse_number<int>(value)) return number;
  }
  return std::nullopt;
}

// Whether this process may read the memory of other processes: some containers forbid the call.
// Open MPI would complain about each message.
bool may_read_processes() {
  const char from = 1;
  char to = 0;
  const iovec local{&to, 1}, remote{const_cast<char*>(&from), 1};
  return ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) == 1;
}

// Open MPI would end the process in MPI_Init without naming a remedy.
void check_step_of_environment() {
  const char* store = std::getenv("PMIX_DSTORE_ESH_BASE_PATH");
  if (store == nullptr || ::access(store, F_OK) == 0) return;
  // Containers without the folder use another store.
  if (std::getenv("PMIX_NAMESPACE") == nullptr || std::getenv("PMIX_MCA_gds") != nullptr) return;
  fail(ExitCode::kUsage,
       "the environment names a step of srun that has ended, or whose files are not here "
       "(PMIX_DSTORE_ESH_BASE_PATH: {}): in a shell that is not in it: unset ${{!PMIX_@}} "
       "${{!SLURM_@}}",
       store);
}

}  // namespace

World::World() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  require(!initialized, "World: at most one per process");
  const int announced = announced_ranks();
  // A process started by hand needs none of Open MPI's helper processes, nor its session folder,
  // which such processes of a machine would share: one could remove it while another starts.
  if (announced == 1 && !environment_number({"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"})) {
    ::setenv("OMPI_MCA_ess_singleton_isolated", "1", /*overwrite=*/0);
    ::setenv("OMPI_MCA_orte_create_session_dirs", "0", /*overwrite=*/0);
  }
  check_step_of_environment();
  // Messages up to this size are copied through shared memory at once. Open MPI's own limit is
  // 4096, and its handshake above takes twice as long as the copy.
  ::setenv("OMPI_MCA_btl_vader_eager_limit", "32768", /*overwrite=*/0);
  // Open MPI's flags for TCP without PUT (2): puts do not use both directions of a link at once. An
  // all_reduce over 400 Mbit/s took twice as long with them (tests/bench/scaling_lab.py).
  ::setenv("OMPI_MCA_btl_tcp_flags", "57", /*overwrite=*/0);
  if (!may_read_processes()) {
    ::setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", /*overwrite=*/0);
  }
  int provided = MPI_THREAD_SINGLE;
  mpi_check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  try {
    if (provided < MPI_THREAD_MULTIPLE) {
      fail(ExitCode::kUsage,
           "the MPI library lacks MPI_THREAD_MULTIPLE (level {} of {}): use one that has it",
           provided, MPI_THREAD_MULTIPLE);
    }
    mpi_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
              "MPI_Comm_set_errhandler");
    group_ = std::make_unique<MpiGroup>(MPI_COMM_WORLD);
    check_world_size(group_->size(), announced);
    find_machine();
  } catch (...) {
    group_.reset();
    if (provided == MPI_THREAD_MULTIPLE) MPI_Finalize();
    throw;
  }
}

World::~World() {
  group_.reset();
  if (std::uncaught_exceptions() == exceptions_at_start_) MPI_Finalize();
}

void World::find_machine() {
  MPI_Comm machine = MPI_COMM_NULL;
  mpi_check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, group_->rank(), MPI_INFO_NULL,
                                &machine),
            "MPI_Comm_split_type");
  mpi_check(MPI_Comm_rank(machine, &local_rank_), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(machine, &local_size_), "MPI_Comm_size");
  std::vector<cpu_set_t> masks(static_cast<std::size_t>(local_size_));
  const cpu_set_t mine = affinity_mask();
  mpi_check(
      MPI_Allgather(&mine, sizeof mine, MPI_BYTE, masks.data(), sizeof mine, MPI_BYTE, machine),
      "MPI_Allgather");
  cores_ = share_of_cores(masks, static_cast<std::size_t>(local_rank_));
  mpi_check(MPI_Comm_free(&machine), "MPI_Comm_free");
  // The machine's name for sbatch --exclude and sinfo.
  if (const char* node = std::getenv("SLURMD_NODENAME"); node != nullptr && *node != '\0') {
    host_ = node;
    return;
  }
  char name[MPI_MAX_PROCESSOR_NAME] = "";
  int length = 0;
  mpi_check(MPI_Get_processor_name(name, &length), "MPI_Get_processor_name");
  host_.assign(name, static_cast<std::size_t>(length));
}

std::unique_ptr<ProcessGroup> World::split(int color, int key, int node_ranks) {
  MPI_Comm part = MPI_COMM_NULL;
  mpi_check(MPI_Comm_split(MPI_COMM_WORLD, color, key, &part), "MPI_Comm_split");
  auto group = std::make_unique<MpiGroup>(part, node_ranks);
  mpi_check(MPI_Comm_free(&part), "MPI_Comm_free");
  return group;
}

void World::abort(int exit_code) {
  // MPI_Abort talks to mpirun. If that hangs too, this thread still ends the process, and mpirun
  // ends with it.
  std::thread([exit_code] {
    std::this_thread::sleep_for(std::chrono::seconds(3));
    std::_Exit(exit_code);
  }).detach();
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);
}

std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  mpi_check(MPI_Get_library_version(text, &length), "MPI_Get_library_version");
  const std::string_view all(text, static_cast<std::size_t>(length));
  return std::string(all.substr(0, all.find(',')));  // the rest names who built it
}

int announced_ranks() {
  if (const auto by_mpi = environment_number({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})) return *by_mpi;
  return slurm_step_tasks().value_or(1);
}

int announced_rank() {
  return environment_number({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"})
      .value_or(0);
}

void check_world_size(int mpi_size, int announced) {
  if (mpi_size > 1 || announced <= 1) return;
  fail(ExitCode::kUsage,
       "the launcher announces {} ranks but MPI sees 1: every process would train alone; under "
       "Slurm start with srun --mpi=pmix, or with the mpirun of this program's MPI library",
       announced);
}

}  // namespace birkhoff
