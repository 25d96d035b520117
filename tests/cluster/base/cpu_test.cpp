#include "cluster/base/cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "cluster/base/instruction_set.h"

namespace birkhoff {
namespace {

// fp32 products, whichever library computes them. With factors rounded to bf16 the error would be a
// hundred times the bound.
TEST(Cpu, ProductsAreOfFp32) {
  compute_on_cpu(at::get_num_threads());
  const at::Tensor a = at::rand({192, 320}), b = at::rand({320, 160}), c = at::rand({4, 48, 320});
  const auto error = [](const at::Tensor& product, const at::Tensor& x, const at::Tensor& y) {
    const at::Tensor exact = at::matmul(x.to(at::kDouble), y.to(at::kDouble));
    return ((product - exact).abs() / exact).max().item<double>();
  };
  // Sums of 320 positive numbers: at most 320 roundings, mostly some up and some down.
  constexpr double kBound = 32 * 0x1p-24;
  EXPECT_LE(error(at::matmul(a, b), a, b), kBound);
  EXPECT_LE(error(at::linear(a, b.t()), a, b), kBound);
  EXPECT_LE(error(at::matmul(c, b), c, b), kBound);
  EXPECT_GT(error(at::matmul(a.to(at::kBFloat16).to(at::kFloat), b), a, b), kBound);
}

TEST(Cpu, ProcessesShareTheCoresThatTheyHaveInCommon) {
  const auto mask = [](std::initializer_list<int> cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores) CPU_SET(core, &set);
    return set;
  };
  const auto shares = [](const std::vector<cpu_set_t>& masks) {
    std::vector<int> all;
    for (std::size_t i = 0; i < masks.size(); ++i) all.push_back(share_of_cores(masks, i));
    return all;
  };
  using Shares = std::vector<int>;
  EXPECT_EQ(shares({mask({0, 1, 2, 3})}), Shares{4});
  EXPECT_EQ(shares({mask({0, 1}), mask({2, 3, 4})}), (Shares{2, 3})) << "each has its own";
  EXPECT_EQ(shares({mask({4, 5, 6, 7, 8}), mask({4, 5, 6, 7, 8})}), (Shares{2, 2}));
  EXPECT_EQ(shares(std::vector<cpu_set_t>(3, mask({0, 1, 2}))), (Shares{1, 1, 1}));
  EXPECT_EQ(shares({mask({0}), mask({0})}), (Shares{1, 1})) << "at least one";
  EXPECT_EQ(shares({mask({0, 1, 2}), mask({2, 3, 4})}), (Shares{2, 2}));
  const int half = std::max(1, machine_cores() / 2);
  EXPECT_EQ(shares({mask({}), mask({})}), (Shares{half, half})) << "the system does not tell";
}

// Number of pages that the system newly maps for this process while `work` runs.
template <typename Work>
std::int64_t new_pages(const Work& work) {
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  work();
  getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

TEST(Cpu, TensorsFindTheMemoryOfEarlierOnes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer has an allocator of its own";
#endif
  compute_on_cpu(at::get_num_threads());
  const auto step = [] {
    std::vector<at::Tensor> tensors;
    for (const std::int64_t mib : {48, 1, 16, 48, 5}) {
      tensors.push_back(at::ones({mib << 20}, at::kByte));
    }
  };
  const std::int64_t first = new_pages(step);
  for (int i = 0; i < 3; ++i) step();
  // Earlier tests may have left memory for the smaller tensors, and a page may have 2 MiB. The
  // process may touch a few pages of its own.
  EXPECT_GE(first, (48 + 48) / 2);
  EXPECT_LE(new_pages(step), first / 50 + 8);
}

// Runs in a process of its own, because our loops and LibTorch decide only once per process.
TEST(CpuDeathTest, OneVariableLimitsOurLoopsAndLibTorch) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto code_of = [](const char* set, InstructionSet expected, const char* libtorch) {
    for (const char* own : {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"})
      unsetenv(own);
    setenv("BIRKHOFF_CPU", set, 1);
    if (instruction_set() != expected || name_of(expected) != set) return 1;
    return at::get_cpu_capability() == libtorch ? 0 : 2;
  };
  EXPECT_EXIT(std::exit(code_of("portable", InstructionSet::kPortable, "DEFAULT")),
              testing::ExitedWithCode(0), "");
  if (!is_supported(InstructionSet::kAvx2)) return;
  EXPECT_EXIT(std::exit(code_of("avx2", InstructionSet::kAvx2, "AVX2")), testing::ExitedWithCode(0),
              "");
}

}  // namespace
}  // namespace birkhoff
