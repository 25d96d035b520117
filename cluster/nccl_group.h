// A Group over NCCL, for tensors in the memory of GPUs: one device for each rank. Operations run on
// a stream of the group's own, in the order they were started, beside the computation.
//
// A handle's wait() makes the caller's current stream wait and returns at once. NCCL moves bytes
// and nothing else: what arrives is summed by our own kernel in rank order
// (cluster/base/collectives/gpu_reduce.cu), so a result has the same bits as MpiGroup's and depends
// neither on NCCL's choice of algorithm nor on which machines an allocation holds.
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

#include "cluster/base/collectives/group.h"
#include "cluster/base/gpu/handles.h"

namespace birkhoff {

class NcclGroup : public Group {
 public:
  // Joins the ranks of `control`, a group for host tensors that carries the communicator's id and
  // is not used afterwards. `device`: this rank's GPU, the current one (cuda_device()).
  // Error(kPeer) if NCCL cannot connect the ranks. Collective over control.
  NcclGroup(Group& control, at::Device device);
  // Waits for the other ranks to come here too, a few seconds at most; while an exception unwinds
  // it does not wait and cuts off what runs. CUDA must still live.
  ~NcclGroup() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  at::Device device() const override { return device_; }

  // Cuts off what runs, on this rank alone: tensors of unfinished operations are garbage, kernels
  // that wait for peers end, later operations throw Error(kPeer) that names the reason.
  // Thread-safe. A thread of the group calls it when NCCL reports an asynchronous error, for
  // instance of the network. What was computed from an operation's result is to be trusted only
  // after a later operation of the group was started without an error: call barrier() before
  // saving.
  void abort(const std::string& reason);

 protected:
  std::unique_ptr<Work> do_all_reduce(at::Tensor tensor, ReduceOp op) override;
  std::unique_ptr<Work> do_reduce_scatter(at::Tensor output, at::Tensor input,
                                          ReduceOp op) override;
  std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor input) override;
  std::unique_ptr<Work> do_all_to_all(at::Tensor output, std::vector<std::int64_t> receive_counts,
                                      at::Tensor input,
                                      std::vector<std::int64_t> send_counts) override;
  std::unique_ptr<Work> do_broadcast(at::Tensor tensor, int root) override;
  // The one operation whose wait() blocks the host.
  std::unique_ptr<Work> do_barrier() override;

 private:
  class StreamWork;
  class HostWork;
  // What goes to, or comes from, one peer.
  struct Piece {
    std::byte* data;
    std::size_t num_bytes;
  };

  // Puts the operation into stream_ behind what the caller's current stream holds. LibTorch's
  // current stream is stream_ while `operation` runs, so what it allocates lives on stream_.
  template <typename Operation>
  CudaEvent submit(Operation operation);
  // Everything down to gather() expects mutex_ to be held.
  void throw_if_failed() const;
  void abort_locked(const std::string& reason);
  // Waits until a call of NCCL that returned `result` is through. Error(kPeer) and abort if it
  // failed, or is not through after `seconds` (0: however long it takes).
  void settle(ncclResult_t result, const char* call, double seconds = 0);
  // Piece p of `sends` goes to rank p, piece p of `receives` comes from rank p.
  void exchange(const std::vector<Piece>& sends, const std::vector<Piece>& receives);
  // out [size * num_bytes] = all ranks' num_bytes at `in`, in rank order.
  void gather(const std::byte* in, std::byte* out, std::size_t num_bytes);

  // Waits for `event`, sleeping; Error(kPeer) if the communicator fails meanwhile.
  void wait_on_host(const CudaEvent& event);
  void watch();

  const at::Device device_;
  int rank_;
  int size_;
  CudaStream stream_;
  mutable std::mutex mutex_;  // NCCL allows one thread at a time in a communicator
  ncclComm_t comm_ = nullptr;
  std::string failure_;                    // empty: none
  std::atomic<bool> interrupted_ = false;  // abort() waits for the mutex: let go of it
  const int exceptions_at_start_;
  std::condition_variable stop_changed_;
  bool stopping_ = false;
  std::thread watcher_;
};

}  // namespace birkhoff
