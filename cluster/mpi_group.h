// A ProcessGroup over MPI for tensors in host memory. Each group has its own communicator and
// communication thread: operations run in the order they were started, concurrently with the
// computation, or on the caller's thread if it waits at once. Threads that wait long for other
// ranks sleep.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <source_location>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/operation_queue.h"
#include "cluster/pieces.h"
#include "cluster/two_levels.h"

namespace birkhoff {

// Throws Error(kPeer) with MPI's text, the call and the source location unless status is
// MPI_SUCCESS. Communicators must have the error handler MPI_ERRORS_RETURN.
void mpi_check(int status, const char* call,
               std::source_location where = std::source_location::current());

class MpiGroup : public ProcessGroup {
 public:
  // Duplicates `parent`. Collective over it. MPI must have been started with MPI_THREAD_MULTIPLE
  // and must outlive the group. With node_ranks, a divisor of its size, all_reduce, reduce_scatter
  // and all_gather have two levels (two_levels.h); 1: one.
  explicit MpiGroup(MPI_Comm parent, int node_ranks = 1);
  // Not collective: does not wait for other ranks. Abandons operations that are still running (an
  // exception is in flight); MPI cannot be finalized properly after that.
  ~MpiGroup() override;

  int rank() const override { return ranks_.rank; }
  int size() const override { return ranks_.size; }
  // The payload that this rank has sent to other ranks, all operations together, and of that to
  // ranks of other nodes; without nodes, all of it. Collectives of MPI itself (large broadcasts,
  // barriers) are not counted.
  std::int64_t bytes_sent() const { return bytes_sent_; }
  std::int64_t bytes_between_nodes() const { return bytes_between_nodes_; }

 protected:
  std::unique_ptr<Work> do_all_reduce(at::Tensor tensor, ReduceOp op) override;
  std::unique_ptr<Work> do_reduce_scatter(at::Tensor output, at::Tensor input,
                                          ReduceOp op) override;
  std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor input) override;
  std::unique_ptr<Work> do_all_to_all(at::Tensor output, Counts receive_counts, at::Tensor input,
                                      Counts send_counts) override;
  std::unique_ptr<Work> do_broadcast(at::Tensor tensor, int root) override;
  std::unique_ptr<Work> do_barrier() override;

 private:
  class MpiTransfers;

  // Hands the operation to the communication thread, or runs it if the caller waits for it.
  template <typename Operation>
  std::unique_ptr<Work> submit(Operation operation);
  // The running operation calls everything below.

  // Sends send_of(p) to each rank p and receives receive_of(p) from it. This rank's own piece is
  // copied, unless both are the same memory.
  template <typename SendOf, typename ReceiveOf>
  void exchange(const SendOf& send_of, const ReceiveOf& receive_of);
  // Sends send_of(p) to each rank p; output = op over the pieces, of elements of type `dtype`, that
  // all ranks send to this one.
  template <typename SendOf>
  void reduce_pieces(const SendOf& send_of, ReduceOp op, at::ScalarType dtype, std::byte* output);
  // Starts the transfers of two pieces: `out` to a peer, `in` from it. This rank's own is copied.
  void start_transfers(int peer, const Piece& out, const Piece& in);
  // Starts the transfer of a piece: start(data, count, request) of each part that one message
  // holds. `call` is the name of the MPI function.
  template <typename Start>
  void transfer(const Piece& piece, const char* call, Start start);
  // Returns when all requests_ are complete.
  void wait_for_requests();
  // A buffer of num_bytes, until the end of the operation.
  std::byte* scratch(std::size_t num_bytes);

  struct Buffer {
    std::unique_ptr<std::byte[]> data;
    std::size_t num_bytes = 0;
  };

  MPI_Comm comm_ = MPI_COMM_NULL;
  NodeRanks ranks_{.rank = 0, .size = 1, .node_ranks = 1};
  int tag_ = 0;  // of the running operation
  std::vector<MPI_Request> requests_;
  std::vector<int> completed_;       // numbers of requests
  std::vector<const void*> inputs_;  // of a reduction
  std::vector<Buffer> buffers_;      // the operations share them
  std::size_t num_buffers_ = 0;      // of the running operation
  std::atomic<std::int64_t> bytes_sent_ = 0, bytes_between_nodes_ = 0;
  std::atomic<bool> abandoned_ = false;
  OperationQueue queue_;
};

}  // namespace birkhoff
