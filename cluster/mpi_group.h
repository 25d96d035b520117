// A Group over MPI, for tensors in host memory. Each has a communicator and a communication thread
// of its own: operations run in the order they were started, beside the computation. While it waits
// for other ranks the thread sleeps, so as many ranks as cores can share the cores.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "cluster/base/collectives/group.h"
#include "cluster/operation_queue.h"

namespace birkhoff {

class MpiGroup : public Group {
 public:
  // Duplicates `parent`. Collective over it. MPI must have been started with MPI_THREAD_MULTIPLE
  // and must outlive the group.
  explicit MpiGroup(MPI_Comm parent);
  // Not collective: does not wait for other ranks. Operations still running (an exception is in
  // flight) are abandoned, and then MPI cannot be finalized in order.
  ~MpiGroup() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }

 protected:
  std::unique_ptr<Work> do_all_reduce(at::Tensor tensor, ReduceOp op) override;
  std::unique_ptr<Work> do_reduce_scatter(at::Tensor output, at::Tensor input,
                                          ReduceOp op) override;
  std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor input) override;
  std::unique_ptr<Work> do_all_to_all(at::Tensor output, std::vector<std::int64_t> receive_counts,
                                      at::Tensor input,
                                      std::vector<std::int64_t> send_counts) override;
  std::unique_ptr<Work> do_broadcast(at::Tensor tensor, int root) override;
  std::unique_ptr<Work> do_barrier() override;

 private:
  // Gives the operation to the communication thread.
  template <typename Operation>
  std::unique_ptr<Work> submit(Operation operation);
  // Everything below runs on the communication thread.
  void send(const std::byte* data, std::size_t num_bytes, int peer);
  void receive(std::byte* data, std::size_t num_bytes, int peer);
  // Until all requests_ are complete.
  void wait_for_requests();
  // Room for num_bytes, reused by the next operation.
  std::byte* scratch(std::size_t num_bytes);
  void all_reduce_small(const at::Tensor& tensor, ReduceOp op);
  void all_reduce_slices(const at::Tensor& tensor, ReduceOp op);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  int tag_ = 0;  // of the operation that runs
  std::vector<MPI_Request> requests_;
  std::unique_ptr<std::byte[]> scratch_;
  std::size_t scratch_bytes_ = 0;
  std::atomic<bool> abandoned_ = false;
  std::unique_ptr<OperationQueue> queue_;
};

}  // namespace birkhoff
