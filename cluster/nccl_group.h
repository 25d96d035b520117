// A ProcessGroup over NCCL for tensors in GPU memory; each rank has one GPU. Operations run on the
// group's own stream, in the order they were started, concurrently with the computation.
//
// wait() on a handle makes the caller's current stream wait and returns at once. NCCL only moves
// bytes: our own kernel reduces the received data in rank order
// (cluster/base/collectives/gpu_reduce.cu). A result therefore has the same bits as MpiGroup's and
// depends neither on NCCL's choice of algorithm nor on which machines the job runs on. With
// SumOrder::kNccl, NCCL reduces, too, and these promises do not hold.
#pragma once

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/gpu/handles.h"
#include "cluster/pieces.h"
#include "cluster/two_levels.h"

namespace birkhoff {

// Version of the NCCL library that this process uses, such as "2.28.3". Local.
std::string nccl_version();

// The order in which a group reduces: that of process_group.h, or NCCL's choice.
enum class SumOrder { kRanks, kNccl };

class NcclGroup : public ProcessGroup {
 public:
  // Connects the ranks of `control`, a group for host tensors: it broadcasts the communicator's id
  // and is not used afterwards. `device` is this rank's GPU and must be the current device
  // (cuda_device()). Error(kPeer) if NCCL cannot connect the ranks. With node_ranks, a divisor of
  // its size, all_reduce, reduce_scatter and all_gather have two levels (two_levels.h); 1: one.
  // SumOrder::kNccl: ncclAllReduce and ncclReduceScatter; node_ranks must be 1. Collective over
  // control.
  NcclGroup(ProcessGroup& control, at::Device device, int node_ranks = 1,
            SumOrder order = SumOrder::kRanks);
  // Waits for the other ranks to get here too, for at most 10 seconds. During exception unwinding
  // it does not wait and aborts running operations. CUDA must outlive the group.
  ~NcclGroup() override;

  int rank() const override { return ranks_.rank; }
  int size() const override { return ranks_.size; }
  at::Device device() const override { return device_; }

  // Aborts running operations, on this rank only: tensors of unfinished operations hold garbage,
  // kernels that wait for peers end, and later operations throw an Error(kPeer) that names the
  // reason. Thread-safe. A thread of the group does the same when NCCL reports an asynchronous
  // error, for instance of the network. Do not trust values computed from an operation's result
  // until a later operation of the group has started without an error: call barrier() before
  // saving.
  void abort(const std::string& reason);

 protected:
  std::unique_ptr<Work> do_all_reduce(at::Tensor tensor, ReduceOp op) override;
  std::unique_ptr<Work> do_reduce_scatter(at::Tensor output, at::Tensor input,
                                          ReduceOp op) override;
  std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor input) override;
  std::unique_ptr<Work> do_all_to_all(at::Tensor output, Counts receive_counts, at::Tensor input,
                                      Counts send_counts) override;
  std::unique_ptr<Work> do_broadcast(at::Tensor tensor, int root) override;
  // The only operation whose wait() blocks the host.
  std::unique_ptr<Work> do_barrier() override;

 private:
  class StreamWork;
  class HostWork;
  class NcclTransfers;

  // Queues the operation on stream_, after the work that is now queued on the caller's current
  // stream. stream_ is LibTorch's current stream while `operation` runs, so its allocations belong
  // to stream_.
  template <typename Operation>
  CudaEvent submit(Operation operation);
  // The same for an operation on these tensors, which the result keeps. They must be on the group's
  // GPU.
  template <typename Operation>
  std::unique_ptr<Work> submit_for(std::vector<at::Tensor> tensors, Operation operation);
  // The functions from here to reduce_rows() require mutex_ to be held.
  void throw_if_failed() const;
  void abort_locked(const std::string& reason);
  // Waits until the NCCL call that returned `result` has finished. Aborts and throws Error(kPeer)
  // if it fails or does not finish within `seconds` (0: no limit).
  void settle(ncclResult_t result, const char* call, double seconds = 0);
  struct Transfer {
    int peer;
    Piece send, receive;  // to and from the peer
  };
  void run_transfers(const std::vector<Transfer>& transfers);
  // Piece p of `sends` goes to rank p. Returns the pieces that come here, one row for each rank.
  std::byte* exchange_into_rows(NcclTransfers& transfers, const Pieces& sends);
  // Piece p of `sends` goes to rank p, piece p of `receives` comes from rank p.
  void exchange(const Pieces& sends, const Pieces& receives);
  // out [size * num_bytes] = all ranks' num_bytes at `in`, in rank order.
  void gather(const std::byte* in, std::byte* out, std::size_t num_bytes);
  // output = op over `num_rows` adjacent rows, in order, which are as long as output.
  void reduce_rows(const std::byte* rows, int num_rows, ReduceOp op, at::ScalarType dtype,
                   const Piece& output);

  // Sleeps until `event` has passed. Error(kPeer) if the communicator fails meanwhile.
  void wait_on_host(const CudaEvent& event);
  void watch();

  const at::Device device_;
  NodeRanks ranks_;
  const SumOrder order_;
  CudaStream stream_;
  mutable std::mutex mutex_;  // NCCL allows one thread at a time in a communicator
  ncclComm_t comm_ = nullptr;
  std::string failure_;                    // empty: none
  std::atomic<bool> interrupted_ = false;  // abort() waits for mutex_: release it
  const int exceptions_at_start_;
  std::condition_variable stop_changed_;
  bool stopping_ = false;
  std::thread watcher_;
};

}  // namespace birkhoff
