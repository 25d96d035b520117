// Makes OpenMP's threads sleep soon while they wait for work. By default they spin for
// milliseconds. While any other load runs, one of them loses its core for a time slice and the
// others spin on theirs until it continues: a step takes many times as long. But to sleep at once
// costs a small model a third of its speed on an idle machine, because waking takes longer than
// most waits (tests/bench/waiting_threads.py).
//
// OpenMP reads its environment when it is loaded, which is before main and before any constructor
// here. So this program first executes itself again, in the same process, with GOMP_SPINCOUNT set,
// unless the user has set how threads wait. The second time, the variable is set. If the program
// cannot be executed again, it continues without the variable.
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

// Runs before the libraries' constructors. Everything that needs them, including malloc and the C
// library's `environ`, is not available yet.
void sleep_soon(int /*argc*/, char** argv, char** environment) {
  std::size_t count = 0;
  for (; environment[count] != nullptr; ++count) {
    for (const char* variable : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}) {
      if (sets(environment[count], variable)) return;
    }
  }
  char spin_count[] = "GOMP_SPINCOUNT=3000";  // well below a tenth of a millisecond
  auto** with_count = static_cast<char**>(alloca((count + 2) * sizeof(char*)));
  std::memcpy(with_count, environment, count * sizeof(char*));
  with_count[count] = spin_count;
  with_count[count + 1] = nullptr;
  // Use the program's path: lists of processes would show /proc/self/exe as "exe".
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  if (length <= 0) return;
  path[length] = '\0';
  execve(path, argv, with_count);
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const first)(int, char**,
                                                                  char**) = &sleep_soon;

}  // namespace
