#include "cluster/base/cpu.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include "cluster/base/instruction_set.h"
#if defined(__GLIBC__)
#include <malloc.h>
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace birkhoff {
namespace {

// MKL uses its AVX2 kernels on CPUs that are not Intel's. oneDNN, LibTorch's other library, uses
// the widest instruction set of the CPU: twice as fast with AVX-512.
bool onednn_is_faster() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

// bf16 tiles in hardware (AMX).
bool has_bf16_tiles() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1) != 0;
#else
  return false;
#endif
}

}  // namespace

void compute_on_cpu(int num_threads) {
  instruction_set();
  at::set_num_threads(num_threads);
  // LibTorch uses oneDNN for fp32 products only if their factors may be rounded to bf16. oneDNN
  // rounds them only on CPUs with tiles and else computes in fp32.
  if (onednn_is_faster() && !has_bf16_tiles()) {
    at::globalContext().setFloat32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL,
                                            at::Float32Precision::BF16);
  }
#if defined(__GLIBC__)
  // Every step creates the same tensors again. If freed memory went back to the system, each 4 KiB
  // of these tensors would cost a page fault: a tenth of a step with ten million parameters.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, -1);
  // Asks for huge pages where the heap will hold these tensors. They save page faults, and ranks of
  // a node gain most, because reading each other's tensors takes time for each page.
  constexpr std::size_t kHeap = std::size_t{1} << 29, kHugePage = std::size_t{1} << 21;
  void* const heap = std::malloc(kHeap);
  if (heap == nullptr) return;
  const std::size_t address = reinterpret_cast<std::uintptr_t>(heap),
                    begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  ::madvise(reinterpret_cast<void*>(begin), address + kHeap - begin, MADV_HUGEPAGE);
  std::free(heap);
#endif
}

int machine_cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

cpu_set_t affinity_mask() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) CPU_ZERO(&mask);
  return mask;
}

int usable_cores() {
  const cpu_set_t mask = affinity_mask();
  const int cores = CPU_COUNT(&mask);
  return cores > 0 ? cores : machine_cores();
}

int share_of_cores(const std::vector<cpu_set_t>& masks, std::size_t which) {
  double share = 0;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &masks[which])) continue;
    const auto users = std::count_if(masks.begin(), masks.end(),
                                     [&](const cpu_set_t& mask) { return CPU_ISSET(core, &mask); });
    share += 1.0 / static_cast<double>(users);
  }
  if (CPU_COUNT(&masks[which]) == 0) share = machine_cores() / static_cast<double>(masks.size());
  constexpr double kRounding = 1e-6;  // of the sum
  return std::max(1, static_cast<int>(share + kRounding));
}

}  // namespace birkhoff
