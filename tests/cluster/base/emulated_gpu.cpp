#include "tests/cluster/base/emulated_gpu.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <numeric>

namespace birkhoff::test {
namespace {

constexpr int kWarp = 32;

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": row and column of element
// i of a lane.
int row_of_a(int lane, int i) { return (i < 2 || (i >= 4 && i < 6)) ? lane / 4 : lane / 4 + 8; }
int column_of_a(int lane, int i) { return lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0); }
int row_of_b(int lane, int i) { return lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0); }
int column_of_b(int lane) { return lane / 4; }
int row_of_c(int lane, int i) { return i < 2 ? lane / 4 : lane / 4 + 8; }
int column_of_c(int lane, int i) { return lane % 4 * 2 + (i & 1); }

float half_of(EmulatedNumber number, std::uint32_t word, int half) {
  return unpack_number(number, static_cast<std::uint16_t>(word >> (16 * half)));
}

}  // namespace

float unpack_number(EmulatedNumber number, std::uint16_t word) {
  if (number == EmulatedNumber::kHalf) return c10::Half(word, c10::Half::from_bits());
  return c10::BFloat16(word, c10::BFloat16::from_bits());
}

std::uint16_t pack_number(EmulatedNumber number, float x) {
  return number == EmulatedNumber::kHalf ? c10::Half(x).x : c10::BFloat16(x).x;
}

EmulatedBlock::EmulatedBlock(int num_threads, std::uint32_t shared_bytes)
    : shared_(shared_bytes),
      copies_(static_cast<std::size_t>(num_threads)),
      warps_(copies_.size() / kWarp, Meeting{.data = std::vector<void*>(kWarp)}),
      all_{.data = std::vector<void*>(copies_.size())} {}

void EmulatedBlock::run(std::int64_t block, bool backwards,
                        const std::function<void(int thread)>& body) {
  block_ = block;
  epoch_ = 0;
  std::fill(shared_.begin(), shared_.end(), std::uint8_t{0xff});  // NaN
  traces_.assign(shared_.size() / 2, Trace{});
  fibers_.run(
      static_cast<unsigned>(copies_.size()), /*leave=*/false,
      [&](std::vector<unsigned>& order) {
        if (backwards) std::iota(order.rbegin(), order.rend(), 0u);
      },
      [&] { body(static_cast<int>(fibers_.thread())); });
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    ThreadCopies& own = copies_[i];
    check(own.open.empty() && own.groups.empty(), "copies outlive their thread",
          static_cast<int>(i));
    own = {};
  }
}

void EmulatedBlock::check(bool holds, const char* otherwise, int thread) {
  if (holds || failed_) return;
  failed_ = true;  // the first one is enough
  ADD_FAILURE() << otherwise << ": block " << block_ << ", thread " << thread << ", after barrier "
                << epoch_;
}

void EmulatedBlock::meet(int thread, Scope scope, Operation operation, void* data, Work work) {
  const std::size_t index = static_cast<std::size_t>(thread);
  const bool of_block = scope == Scope::kAll;
  FiberBlock::Barrier& barrier = of_block ? fibers_.of_block() : fibers_.of_warp();
  Meeting& meeting = of_block ? all_ : warps_[index / kWarp];
  check(barrier.arrived == 0 || meeting.operation == operation, "lanes part", thread);
  meeting.operation = operation;
  meeting.data[of_block ? index : index % kWarp] = data;
  fibers_.wait(barrier, [&] {
    (this->*work)(meeting.data.data());
    if (of_block) ++epoch_;
  });
}

std::uint8_t* EmulatedBlock::note_write(int thread, std::uint32_t to, std::uint32_t bytes,
                                        bool under_way) {
  check(to + bytes <= shared_.size() && to % bytes == 0, "write out of shared memory", thread);
  const int warp = thread / kWarp;
  for (std::uint32_t i = to / 2; i < (to + bytes) / 2 && i < traces_.size(); ++i) {
    Trace& trace = traces_[i];
    check(trace.written != epoch_ || trace.writer == warp, "two warps write", thread);
    check(trace.read != epoch_ || (trace.readers & ~(1u << warp)) == 0,
          "written while another warp may read", thread);
    trace.written = epoch_;
    trace.writer = warp;
    trace.under_way = under_way;
  }
  return shared_.data() + to;
}

const std::uint8_t* EmulatedBlock::note_read(int thread, std::uint32_t from, std::uint32_t bytes) {
  check(from + bytes <= shared_.size() && from % bytes == 0, "read out of shared memory", thread);
  const int warp = thread / kWarp;
  for (std::uint32_t i = from / 2; i < (from + bytes) / 2 && i < traces_.size(); ++i) {
    Trace& trace = traces_[i];
    check(trace.written >= 0, "read before anything is written", thread);
    check(!trace.under_way, "read before the copy is waited for", thread);
    check(trace.written != epoch_ || trace.writer == warp, "read while another warp may write",
          thread);
    if (trace.read != epoch_) trace.readers = 0;
    trace.read = epoch_;
    trace.readers |= 1u << warp;
  }
  return shared_.data() + from;
}

void EmulatedBlock::copy_async(int thread, std::uint32_t to, const void* from, int bytes,
                               bool exists) {
  note_write(thread, to, static_cast<std::uint32_t>(bytes), /*under_way=*/true);
  check(!exists || std::bit_cast<std::uintptr_t>(from) % static_cast<unsigned>(bytes) == 0,
        "copy from an odd address", thread);
  copies_[static_cast<std::size_t>(thread)].open.push_back({to, from, bytes, exists});
}

void EmulatedBlock::commit(int thread) {
  ThreadCopies& own = copies_[static_cast<std::size_t>(thread)];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}

void EmulatedBlock::wait(int thread, int groups) {
  ThreadCopies& own = copies_[static_cast<std::size_t>(thread)];
  while (own.groups.size() > static_cast<std::size_t>(groups)) {
    for (const Copy& copy : own.groups.front()) {
      const auto bytes = static_cast<std::uint32_t>(copy.bytes);
      std::uint8_t* to = note_write(thread, copy.to, bytes, /*under_way=*/false);
      if (copy.exists) {
        std::memcpy(to, copy.from, bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
    own.groups.pop_front();
  }
}

void EmulatedBlock::store(int thread, std::uint32_t to, const void* from, std::uint32_t bytes) {
  std::memcpy(note_write(thread, to, bytes, /*under_way=*/false), from, bytes);
}

void EmulatedBlock::load(int thread, std::uint32_t from, void* to, std::uint32_t bytes) {
  std::memcpy(to, note_read(thread, from, bytes), bytes);
}

void EmulatedBlock::load_matrices(void* const* data) {
  const auto lane_data = [&](int lane) { return static_cast<const LoadMatrices*>(data[lane]); };
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::uint16_t numbers[8][8];
    std::uint32_t banks = 0;
    for (int row = 0; row < 8; ++row) {
      const LoadMatrices& address = *lane_data(8 * matrix + row);
      std::memcpy(numbers[row], note_read(address.thread, address.from, 16), 16);
      banks |= 1u << (address.from / 16 % 8);
    }
    check(banks == 0xff, "rows of ldmatrix share banks", lane_data(8 * matrix)->thread);
    for (int lane = 0; lane < kWarp; ++lane) {
      const int first = lane / 4, second = lane % 4 * 2;
      const bool transposed = lane_data(lane)->transposed;
      const std::uint32_t low = transposed ? numbers[second][first] : numbers[first][second];
      const std::uint32_t high =
          transposed ? numbers[second + 1][first] : numbers[first][second + 1];
      lane_data(lane)->to[matrix] = high << 16 | low;
    }
  }
}

void EmulatedBlock::multiply(void* const* data) {
  double a[16][16], b[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const Multiply& operands = *static_cast<const Multiply*>(data[lane]);
    for (int i = 0; i < 8; ++i) {
      a[row_of_a(lane, i)][column_of_a(lane, i)] =
          half_of(operands.number, operands.a[i / 2], i % 2);
    }
    for (int i = 0; i < 4; ++i) {
      b[row_of_b(lane, i)][column_of_b(lane)] = half_of(operands.number, operands.b[i / 2], i % 2);
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    float* c = static_cast<const Multiply*>(data[lane])->c;
    for (int i = 0; i < 4; ++i) {
      double sum = c[i];
      for (int k = 0; k < 16; ++k) sum += a[row_of_c(lane, i)][k] * b[k][column_of_c(lane, i)];
      c[i] = static_cast<float>(sum);
    }
  }
}

void EmulatedBlock::exchange(void* const* data) {
  for (int lane = 0; lane < kWarp; ++lane) {
    Exchange& own = *static_cast<Exchange*>(data[lane]);
    own.result = static_cast<const Exchange*>(data[lane ^ own.mask])->x;
  }
}

}  // namespace birkhoff::test
