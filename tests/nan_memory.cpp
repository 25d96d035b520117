// When preloaded into a program, sets every byte of heap memory to 0xFF when it is allocated and
// when it is freed. Each float, double, half and bfloat16 there is NaN, each index -1, each pointer
// wild, so reads of uninitialized memory become visible. `tests/nightly nan_memory` runs the tests
// this way. Not for sanitizer builds, which have their own allocators. Open MPI's launcher itself
// reads such memory (4.1: orte_rml_oob_send_buffer_nb), so it is excluded.
#include <malloc.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

extern "C" {

// glibc's functions.
void* __libc_malloc(std::size_t size);
void* __libc_realloc(void* memory, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
void __libc_free(void* memory);

static bool is_launcher() {
  return std::strcmp(program_invocation_short_name, "mpirun") == 0 ||
         std::strcmp(program_invocation_short_name, "mpiexec") == 0 ||
         std::strcmp(program_invocation_short_name, "orterun") == 0;
}

static void* filled(void* memory) {
  if (is_launcher()) return memory;
  // Fills the whole usable block, so that the part that realloc() may add is filled, too.
  if (memory != nullptr) std::memset(memory, 0xff, malloc_usable_size(memory));
  return memory;
}

void* malloc(std::size_t size) { return filled(__libc_malloc(size)); }

void free(void* memory) {
  const int error = errno;
  filled(memory);
  __libc_free(memory);
  errno = error;
}

void* realloc(void* memory, std::size_t size) {
  if (memory == nullptr) return malloc(size);
  const std::size_t kept = std::min(malloc_usable_size(memory), size);
  void* moved = __libc_realloc(memory, size);
  if (moved == nullptr) return nullptr;
  if (!is_launcher())
    std::memset(static_cast<char*>(moved) + kept, 0xff, malloc_usable_size(moved) - kept);
  return moved;
}

void* memalign(std::size_t alignment, std::size_t size) {
  return filled(__libc_memalign(alignment, size));
}

void* aligned_alloc(std::size_t alignment, std::size_t size) { return memalign(alignment, size); }

int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  if (alignment % sizeof(void*) != 0 || (alignment & (alignment - 1)) != 0) return EINVAL;
  const int error = errno;
  void* made = memalign(alignment, size);
  errno = error;
  if (made == nullptr) return ENOMEM;
  *memory = made;
  return 0;
}

}  // extern "C"
