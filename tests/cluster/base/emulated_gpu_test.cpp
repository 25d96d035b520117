// The emulation multiplies as a GPU does, and finds the errors that it claims to find.
#include "tests/cluster/base/emulated_gpu.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff::test {
namespace {

using Thread = EmulatedThread<EmulatedNumber::kBFloat16>;

constexpr std::uint32_t kRow = 144;  // bytes; eight rows cover all banks

// Element [row][column] of a 16 x 16 matrix, exact in 8 bits.
int number(int matrix, int row, int column) { return (7 * row + 3 * column + 5 * matrix) % 13 - 6; }

std::uint32_t place(int matrix, int row, int column) {
  return static_cast<std::uint32_t>(matrix) * 16 * kRow + static_cast<std::uint32_t>(row) * kRow +
         2 * static_cast<std::uint32_t>(column);
}

TEST(EmulatedGpu, MultipliesMatricesInSharedMemory) {
  EmulatedBlock block(32, 2 * 16 * kRow);
  float product[16][16] = {};
  block.run(0, /*backwards=*/false, [&](int index) {
    const Thread thread(block, index);
    for (int i = index; i < 2 * 16 * 8; i += 32) {
      const int matrix = i / 128, row = i / 8 % 16, column = i % 8 * 2;
      thread.store_shared(place(matrix, row, column),
                          thread.pack(static_cast<float>(number(matrix, row, column)),
                                      static_cast<float>(number(matrix, row, column + 1))));
    }
    thread.sync_warp();
    std::uint32_t a[4], b[4];
    thread.load_matrices<false>(a, place(0, index % 16, index / 16 * 8));
    thread.load_matrices<true>(b, place(1, index % 16, index / 16 * 8));
    for (int half = 0; half < 2; ++half) {
      float c[4] = {};
      thread.multiply(c, a, b[2 * half], b[2 * half + 1]);
      for (int i = 0; i < 4; ++i) {
        product[index / 4 + i / 2 * 8][8 * half + index % 4 * 2 + i % 2] = c[i];
      }
    }
  });
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      int sum = 0;
      for (int k = 0; k < 16; ++k) sum += number(0, row, k) * number(1, k, column);
      EXPECT_EQ(product[row][column], sum) << row << ", " << column;
    }
  }
}

void run(int num_threads, const std::function<void(const Thread&)>& body) {
  EmulatedBlock block(num_threads, 4096);
  block.run(0, /*backwards=*/false, [&](int index) { body(Thread(block, index)); });
}

// Warp 0 writes what warp 1 reads.
void hand_over(bool with_barrier) {
  run(64, [&](const Thread& thread) {
    const auto to = static_cast<std::uint32_t>(thread.index() % 32 * 4);
    if (thread.index() < 32) thread.store_shared(to, 1.0f);
    if (with_barrier) thread.sync();
    const float there = thread.index() < 32 ? 1.0f : thread.load_shared<float>(to);
    EXPECT_EQ(there, 1.0f);
  });
}

TEST(EmulatedGpu, FindsAMissingBarrier) {
  hand_over(true);
  EXPECT_NONFATAL_FAILURE(hand_over(false), "read while another warp may write");
}

void copy(bool with_wait) {
  alignas(16) static const float numbers[] = {1, 2, 3, 4};
  run(32, [&](const Thread& thread) {
    const auto to = static_cast<std::uint32_t>(thread.index() * 16);
    thread.copy_async<16>(to, numbers, thread.index() % 2 == 0);
    thread.commit();
    if (with_wait) thread.wait<0>();
    const float last = thread.load_shared<float>(to + 12);
    thread.wait<0>();
    EXPECT_TRUE(!with_wait || last == (thread.index() % 2 == 0 ? 4 : 0));
  });
}

TEST(EmulatedGpu, FindsAMissingWait) {
  copy(true);
  EXPECT_NONFATAL_FAILURE(copy(false), "read before the copy is waited for");
}

TEST(EmulatedGpu, FindsBankConflicts) {
  const auto load = [] {
    run(32, [](const Thread& thread) {
      const auto row = static_cast<std::uint32_t>(thread.index() * 128);
      thread.store_shared(row, Words{});
      thread.sync_warp();
      std::uint32_t to[4];
      thread.load_matrices<false>(to, row);
    });
  };
  EXPECT_NONFATAL_FAILURE(load(), "share banks");
}

TEST(EmulatedGpu, FindsThreadsThatWaitForever) {
  EXPECT_THROW(run(64,
                   [](const Thread& thread) {
                     if (thread.index() < 32) thread.sync();
                   }),
               std::runtime_error);
}

}  // namespace
}  // namespace birkhoff::test
