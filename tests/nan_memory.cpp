// Preloaded into a program, sets every byte of memory that it gets from the heap, and that it gives
// back, to 0xFF: each float, double, half and bfloat16 there is NaN, each index -1, each pointer
// wild. What is read before it is written shows. tests/nightly nan_memory runs the tests so. Not
// for sanitizer builds, which have allocators of their own. Open MPI's launcher reads such memory
// itself (4.1: orte_rml_oob_send_buffer_nb) and is left alone.
#include <malloc.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

extern "C" {

// glibc's own.
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
  // All that the block holds, so that realloc() finds what it adds filled.
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
