// Makes OpenMP's threads sleep soon while they wait for work. By default they spin for
// milliseconds. While any other load runs, one of them loses its core for a time slice and the rest
// spin on their cores until it continues: a step takes many times as long. But to sleep at once
// costs a small model a third of its speed on an idle machine, because waking takes longer than
// most waits (tests/bench/waiting_threads.py).
//
// And keeps OpenMP from binding threads to cores (OMP_PROC_BIND and the like), which many modules
// ask for. It would bind the first thread as soon as it is loaded: the program would see one core,
// all ranks of a machine would compute on the same ones, and the threads that read data and save
// would share the core of the first. A binding of whole ranks, by srun, mpirun or taskset, stands.
//
// OpenMP reads its environment when it is loaded, which is before main and before any constructor
// here. So this program first executes itself again, in the same process, with GOMP_SPINCOUNT set,
// unless the user has set how threads wait, and with OMP_PROC_BIND=false if a variable asks for a
// binding. The second time, nothing is left to change. If the program cannot be executed again, it
// continues as it was started.
#include <alloca.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <initializer_list>

namespace {

bool sets(const char* entry, const char* variable) {
  const std::size_t length = std::strlen(variable);
  return std::strncmp(entry, variable, length) == 0 && entry[length] == '=';
}

bool sets_one_of(const char* entry, std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    if (sets(entry, variable)) return true;
  }
  return false;
}

// Runs before the libraries' constructors. Everything that needs them, including malloc and the C
// library's `environ`, is not available yet.
void prepare_openmp(int /*argc*/, char** argv, char** environment) {
  char spin_count[] = "GOMP_SPINCOUNT=3000";  // well below a tenth of a millisecond
  char no_binding[] = "OMP_PROC_BIND=false";
  bool waits = true, binds = false, is_off = false;
  std::size_t count = 0;
  for (; environment[count] != nullptr; ++count) {
    const char* entry = environment[count];
    if (sets_one_of(entry, {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})) waits = false;
    if (sets_one_of(entry, {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})) {
      binds = true;
    }
    if (std::strcmp(entry, no_binding) == 0) is_off = true;
  }
  binds = binds && !is_off;
  if (!waits && !binds) return;
  auto** changed = static_cast<char**>(alloca((count + 3) * sizeof(char*)));
  char** next = changed;
  if (waits) *next++ = spin_count;
  if (binds) *next++ = no_binding;
  for (std::size_t i = 0; i < count; ++i) {
    if (!binds || !sets(environment[i], "OMP_PROC_BIND")) *next++ = environment[i];
  }
  *next = nullptr;
  // Use the program's path: lists of processes would show /proc/self/exe as "exe".
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  if (length <= 0) return;
  path[length] = '\0';
  execve(path, argv, changed);
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const first)(int, char**,
                                                                  char**) = &prepare_openmp;

}  // namespace
