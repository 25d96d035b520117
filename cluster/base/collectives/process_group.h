// Collective communication over a fixed set of ranks. Implementations: MpiGroup
// (cluster/mpi_group.h) for host tensors, NcclGroup (cluster/nccl_group.h) for GPU tensors, and
// ThreadGroup (tests/cluster/base/thread_group.h) for tests whose ranks are threads.
//
// Every operation is collective over the group: all ranks must call the same operations in the same
// order, with matching shapes and dtypes. Tensors are contiguous, on the group's device, and of
// dtype fp32, fp64, bf16 or int64. Sums are taken in rank order 0, 1, 2, ... (bf16 accumulates in
// fp32), or first inside nodes (cluster/two_levels.h), so a result depends on the number of ranks
// and of nodes but never on timing.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/base/gpu/kernel_types.h"

namespace birkhoff {

// A running operation. Its tensors must not be touched until wait() returns.
class Work {
 public:
  virtual ~Work() = default;
  // Host tensors: blocks until the operation is done; sleeps if that takes long. GPU tensors: work
  // that the caller queues on its current stream from now on runs after the operation. Rethrows the
  // operation's error. May be called once.
  virtual void wait() = 0;
};
// An operation that is done when it returns.
std::unique_ptr<Work> done_work();

// The last operations of a group, for the watchdog, the byte counters and the tests. Thread-safe.
class OperationRing {
 public:
  struct Entry {
    std::int64_t sequence = -1;  // 0, 1, 2, ... in the group's order
    std::string operation;       // "all_reduce", ...
    std::string name;            // given by the caller: what the operation is for
    std::vector<std::int64_t> shape;
    std::int64_t bytes = 0;  // of this rank's input
    bool waiting = false;    // the rank waits for it: since its start, or since it called wait()
    bool done = false;
  };
  static constexpr std::size_t kCapacity = 256;

  // waiting: the caller waits at once, without begin_waiting().
  std::int64_t start(std::string_view operation, std::string_view name, const at::Tensor& tensor,
                     bool waiting);
  void begin_waiting(std::int64_t sequence);
  // After an operation that failed.
  void stop_waiting();
  void finish(std::int64_t sequence);
  // Oldest first, at most kCapacity.
  std::vector<Entry> entries() const;
  // The operation that this rank waits for, or else the one started last; sequence is -1 if there
  // is none.
  Entry current() const;
  std::int64_t total_operations() const;

 private:
  mutable std::mutex mutex_;
  std::array<Entry, kCapacity> ring_;
  std::int64_t next_ = 0;
  std::int64_t waiting_ = -1;  // sequence of the operation waited for; -1: none
};

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  ProcessGroup() = default;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The device of all tensors that operations take.
  virtual at::Device device() const { return at::kCPU; }

  // In place: tensor = op over all ranks' tensors. The same bits on every rank. Equal to
  // reduce_scatter of equal slices followed by all_gather: each owner reduces its slice in rank
  // order.
  void all_reduce(at::Tensor tensor, ReduceOp op, std::string_view name);
  std::unique_ptr<Work> all_reduce_async(at::Tensor tensor, ReduceOp op, std::string_view name);
  // output [n] = slice `rank` of op over all ranks' input [size * n]. output may alias this slice
  // of input.
  std::unique_ptr<Work> reduce_scatter_async(at::Tensor output, at::Tensor input, ReduceOp op,
                                             std::string_view name);
  void reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op, std::string_view name);
  // output [size * n] = all ranks' input [n], in rank order. input may alias slice `rank` of
  // output.
  std::unique_ptr<Work> all_gather_async(at::Tensor output, at::Tensor input,
                                         std::string_view name);
  void all_gather(at::Tensor output, at::Tensor input, std::string_view name);
  // input is split into send_counts[p] elements for each peer p; output receives receive_counts[p]
  // elements from each p. The tensors are 1-D.
  std::unique_ptr<Work> all_to_all_async(at::Tensor output,
                                         std::span<const std::int64_t> receive_counts,
                                         at::Tensor input,
                                         std::span<const std::int64_t> send_counts,
                                         std::string_view name);
  void all_to_all(at::Tensor output, std::span<const std::int64_t> receive_counts, at::Tensor input,
                  std::span<const std::int64_t> send_counts, std::string_view name);
  // In place: every rank's tensor becomes root's.
  void broadcast(at::Tensor tensor, int root, std::string_view name);
  // Returns when every rank has called it.
  void barrier(std::string_view name);

  // Bytes of any length from every rank, in rank order. For small control messages, not for the hot
  // path.
  std::vector<std::string> all_gather_bytes(const std::string& mine, std::string_view name);
  // Root's bytes on every rank.
  std::string broadcast_bytes(const std::string& mine, int root, std::string_view name);

  const OperationRing& ring() const { return ring_; }

 protected:
  // A number in [0, 32768) for the operation being started: a hash of its kind, name and sequence
  // number. Messages carry it. So if a rank skips an operation, the messages of its next operation
  // are not mistaken for those of the skipped one. For use inside do_*().
  int operation_tag() const { return operation_tag_; }
  // Whether the caller waits for the operation being started before it does anything else. For use
  // inside do_*().
  bool caller_waits() const { return caller_waits_; }
  // Implementations start the operation and return a handle; if the caller waits, they may also
  // finish it and return null. Arguments are already checked.
  virtual std::unique_ptr<Work> do_all_reduce(at::Tensor tensor, ReduceOp op) = 0;
  virtual std::unique_ptr<Work> do_reduce_scatter(at::Tensor output, at::Tensor input,
                                                  ReduceOp op) = 0;
  virtual std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor input) = 0;
  using Counts = std::span<const std::int64_t>;  // valid only during the call
  virtual std::unique_ptr<Work> do_all_to_all(at::Tensor output, Counts receive_counts,
                                              at::Tensor input, Counts send_counts) = 0;
  virtual std::unique_ptr<Work> do_broadcast(at::Tensor tensor, int root) = 0;
  virtual std::unique_ptr<Work> do_barrier() = 0;

 private:
  void start(std::string_view operation, std::string_view name, const at::Tensor& tensor);
  // The started operation's work; wait() also updates the ring.
  std::unique_ptr<Work> recorded(std::unique_ptr<Work> work);

  // Calls start(), which starts an operation, and waits until it is done.
  template <typename Start>
  void start_and_wait(const Start& start);

  OperationRing ring_;
  // Of the operation being started:
  std::int64_t sequence_ = -1;
  int operation_tag_ = 0;
  bool caller_waits_ = false;
};

// Whether any rank of the group passes true. The group is on hosts. Collective; nothing is sent in
// a group of one.
bool any_rank(ProcessGroup& group, bool mine, std::string_view name);

// A group of one: every operation is the identity. For commands and models that use no parallelism.
std::unique_ptr<ProcessGroup> make_single_group(at::Device device = at::kCPU);

// ---- The time that a thread has waited for other ranks, summed over all groups. The rest of a
// step is the rank's own work. Of an operation that the thread runs itself, only polling counts,
// and not the first polls, which take about a microsecond or move data; copies and sums are the
// rank's own work. For GPU tensors Work::wait() does not block: the GPU's stream waits, which is
// not counted either.

// Seconds that the calling thread has waited so far. Local.
double waited_seconds();

// Adds the time from its construction to its destruction to the thread's waited seconds. For
// implementations of ProcessGroup.
class WaitTimer {
 public:
  WaitTimer() = default;
  ~WaitTimer();
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace birkhoff
