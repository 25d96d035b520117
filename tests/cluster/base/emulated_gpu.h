// Emulates one block of GPU threads on the CPU, to test kernels whose source takes its thread class
// as a template parameter (cluster/base/gpu/gpu_thread.cuh). Every thread is a fiber; an operation
// of a whole warp happens when all of its lanes have reached it.
//
// It fails a test, and names the cause, for errors that a GPU would not report: shared memory
// accessed out of bounds, read before it is written, or accessed by two warps of which one writes,
// without a barrier in between; an asynchronous copy used before its wait; lanes that diverge at an
// operation of the whole warp; and ldmatrix rows that share banks.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "tests/cluster/base/fiber.h"

namespace birkhoff::test {

enum class EmulatedNumber { kBFloat16, kHalf };
float unpack_number(EmulatedNumber number, std::uint16_t word);
std::uint16_t pack_number(EmulatedNumber number, float x);  // to nearest, ties to even

class EmulatedBlock {
 public:
  EmulatedBlock(int num_threads, std::uint32_t shared_bytes);

  // Runs body(thread) for all threads of the block. With `backwards` the last warp and lane go
  // first.
  void run(std::int64_t block, bool backwards, const std::function<void(int thread)>& body);

  // ---- Called by running threads.

  enum class Scope { kWarp, kThreadBlock };
  enum class Operation { kSync, kSyncWarp, kLoad, kLoadTransposed, kMultiply, kExchange };
  // Waits for all threads of the warp or block; all must pass the same `operation`. The last one to
  // arrive runs `work` with the `data` of each.
  using Work = void (EmulatedBlock::*)(void* const* data);
  void meet(int thread, Scope scope, Operation operation, void* data, Work work);

  void copy_async(int thread, std::uint32_t to, const void* from, int bytes, bool exists);
  void commit(int thread);
  void wait(int thread, int groups);
  void store(int thread, std::uint32_t to, const void* from, std::uint32_t bytes);
  void load(int thread, std::uint32_t from, void* to, std::uint32_t bytes);
  std::int64_t block() const { return block_; }

  // data: the LoadMatrices, Multiply or Exchange of each lane.
  void load_matrices(void* const* data);
  void multiply(void* const* data);
  void exchange(void* const* data);
  void nothing(void* const*) {}

 private:
  // Where all threads of a warp or block have to pass the same operation.
  struct Meeting {
    std::vector<void*> data;
    Operation operation{};
  };
  // An asynchronous copy; it happens when its thread waits for it.
  struct Copy {
    std::uint32_t to;
    const void* from;
    int bytes;
    bool exists;
  };
  // The asynchronous copies of a thread.
  struct ThreadCopies {
    std::vector<Copy> open;                // not committed yet
    std::deque<std::vector<Copy>> groups;  // committed and under way
  };
  // The last accesses to a 16-bit word of shared memory.
  struct Trace {
    int written = -1, read = -1;  // the epochs of the last write and read; -1: never
    int writer = -1;              // warp
    std::uint32_t readers = 0;    // warps, in epoch `read`
    bool under_way = false;       // an asynchronous copy to here
  };

  std::uint8_t* note_write(int thread, std::uint32_t to, std::uint32_t bytes, bool under_way);
  const std::uint8_t* note_read(int thread, std::uint32_t from, std::uint32_t bytes);

  void check(bool holds, const char* otherwise, int thread);

  std::vector<std::uint8_t> shared_;
  std::vector<Trace> traces_;
  FiberBlock fibers_;
  std::vector<ThreadCopies> copies_;  // of each thread
  std::vector<Meeting> warps_;
  Meeting all_;
  std::int64_t block_ = 0;
  int epoch_ = 0;  // barriers of the block so far
  bool failed_ = false;
};

struct LoadMatrices {
  std::uint32_t* to;
  std::uint32_t from;
  bool transposed;
  int thread;
};
struct Multiply {
  float* c;
  const std::uint32_t* a;
  std::uint32_t b[2];
  EmulatedNumber number;
};
struct Exchange {
  std::uint32_t x, result;
  int mask;
};

// Has the interface of GpuThread.
template <EmulatedNumber kNumber>
class EmulatedThread {
 public:
  EmulatedThread(EmulatedBlock& block, int index) : block_(&block), index_(index) {}

  int index() const { return index_; }
  std::int64_t block() const { return block_->block(); }
  void sync() const { meet(Block::Scope::kThreadBlock, Op::kSync, nullptr, &Block::nothing); }
  void sync_warp() const { meet(Block::Scope::kWarp, Op::kSyncWarp, nullptr, &Block::nothing); }

  template <int kBytes>
  void copy_async(std::uint32_t to, const void* from, bool exists) const {
    block_->copy_async(index_, to, from, kBytes, exists);
  }
  void commit() const { block_->commit(index_); }
  void prefetch(const void*) const {}
  template <int kGroups>
  void wait() const {
    block_->wait(index_, kGroups);
  }

  template <bool kTransposed>
  void load_matrices(std::uint32_t (&to)[4], std::uint32_t from) const {
    LoadMatrices data{to, from, kTransposed, index_};
    meet(Block::Scope::kWarp, kTransposed ? Op::kLoadTransposed : Op::kLoad, &data,
         &Block::load_matrices);
  }
  void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                std::uint32_t b1) const {
    Multiply data{c, a, {b0, b1}, kNumber};
    meet(Block::Scope::kWarp, Op::kMultiply, &data, &Block::multiply);
  }
  template <typename Number>
  Number exchange(Number x, int mask) const {
    Exchange data{std::bit_cast<std::uint32_t>(x), 0, mask};
    meet(Block::Scope::kWarp, Op::kExchange, &data, &Block::exchange);
    return std::bit_cast<Number>(data.result);
  }
  std::uint32_t ballot(bool x) const {
    std::uint32_t lanes = std::uint32_t{x} << (index_ % 32);
    for (int mask = 1; mask < 32; mask *= 2) lanes |= exchange(lanes, mask);
    return lanes;
  }
  bool any(bool x) const { return ballot(x) != 0; }
  int largest(int x) const {
    for (int mask = 1; mask < 32; mask *= 2) x = std::max(x, exchange(x, mask));
    return x;
  }

  std::uint32_t pack(float low, float high) const {
    return static_cast<std::uint32_t>(pack_number(kNumber, high)) << 16 | pack_number(kNumber, low);
  }
  float unpack(std::uint16_t word) const { return unpack_number(kNumber, word); }
  float exp2(float x) const { return std::exp2(x); }
  float log2(float x) const { return std::log2(x); }

  template <typename Value>
  void store_shared(std::uint32_t to, const Value& value) const {
    block_->store(index_, to, &value, sizeof(value));
  }
  template <typename Value>
  Value load_shared(std::uint32_t from) const {
    Value value;
    block_->load(index_, from, &value, sizeof(value));
    return value;
  }

 private:
  using Block = EmulatedBlock;
  using Op = Block::Operation;
  void meet(Block::Scope scope, Op operation, void* data, Block::Work work) const {
    block_->meet(index_, scope, operation, data, work);
  }

  EmulatedBlock* block_;
  int index_;
};

}  // namespace birkhoff::test
