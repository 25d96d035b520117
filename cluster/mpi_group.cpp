#include "cluster/mpi_group.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "cluster/base/collectives/reduce.h"
#include "cluster/base/error.h"
#include "cluster/mpi_check.h"

namespace birkhoff {
namespace {

// MPI counts are int. Each completed piece also shows the waiting thread that data is flowing.
constexpr std::size_t kPieceBytes = std::size_t{1} << 20;
// If a rank receives at most this many bytes in total, all_reduce sends every tensor to every rank:
// one exchange instead of two.
constexpr std::size_t kSmallBytes = 16384;

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

void copy_bytes(std::byte* to, const std::byte* from, std::size_t num_bytes) {
  if (to != from && num_bytes > 0) std::memcpy(to, from, num_bytes);
}

// Pauses after a poll that found nothing: yields the core during the first microseconds, then
// sleeps for a sixteenth of the time waited so far. A long wait thus costs almost nothing, and no
// wait grows by more than a sixteenth.
class PollPause {
 public:
  void restart() { start_ = Clock::now(); }
  void operator()() const {
    using std::chrono::microseconds;
    const auto waited = std::chrono::duration_cast<microseconds>(Clock::now() - start_);
    if (waited < microseconds(20)) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::clamp(waited / 16, microseconds(20), microseconds(500)));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

MpiGroup::MpiGroup(MPI_Comm parent) : queue_(std::make_unique<OperationQueue>()) {
  mpi_check(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
  mpi_check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  mpi_check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
}

MpiGroup::~MpiGroup() {
  abandoned_ = queue_->busy();
  queue_.reset();
  if (requests_.empty()) {
    MPI_Comm_free(&comm_);
  } else {
    (void)scratch_.release();  // MPI may still write into it
  }
}

// ---- Operations

template <typename Operation>
std::unique_ptr<Work> MpiGroup::submit(Operation operation) {
  return queue_->submit([this, tag = operation_tag(), operation = std::move(operation)] {
    tag_ = tag;
    operation();
  });
}

std::unique_ptr<Work> MpiGroup::do_all_reduce(at::Tensor tensor, ReduceOp op) {
  return submit([this, tensor = std::move(tensor), op] {
    if (size_ == 1) return;
    if (tensor.nbytes() * static_cast<std::size_t>(size_) <= kSmallBytes) {
      all_reduce_small(tensor, op);
    } else {
      all_reduce_slices(tensor, op);
    }
  });
}

void MpiGroup::all_reduce_small(const at::Tensor& tensor, ReduceOp op) {
  const std::size_t num_bytes = tensor.nbytes();
  std::byte* gathered = scratch(num_bytes * static_cast<std::size_t>(size_));
  std::vector<const void*> inputs;
  for (int peer = 0; peer < size_; ++peer) {
    inputs.push_back(gathered + static_cast<std::size_t>(peer) * num_bytes);
    if (peer == rank_) {
      inputs.back() = bytes_of(tensor);
    } else {
      receive(gathered + static_cast<std::size_t>(peer) * num_bytes, num_bytes, peer);
      send(bytes_of(tensor), num_bytes, peer);
    }
  }
  wait_for_requests();
  reduce_in_order(op, tensor.scalar_type(), inputs, bytes_of(tensor), tensor.numel());
}

void MpiGroup::all_reduce_slices(const at::Tensor& tensor, ReduceOp op) {
  const std::size_t item_bytes = tensor.itemsize();
  // Rank p owns and reduces slice p: elements [first(p), first(p + 1)).
  const auto first = [&](int p) { return tensor.numel() * p / size_; };
  const auto slice = [&](int p) {
    return bytes_of(tensor) + static_cast<std::size_t>(first(p)) * item_bytes;
  };
  const auto slice_bytes = [&](int p) {
    return static_cast<std::size_t>(first(p + 1) - first(p)) * item_bytes;
  };

  const std::size_t my_bytes = slice_bytes(rank_);
  std::byte* received = scratch(my_bytes * static_cast<std::size_t>(size_));
  std::vector<const void*> inputs;
  for (int peer = 0; peer < size_; ++peer) {
    inputs.push_back(received + static_cast<std::size_t>(peer) * my_bytes);
    if (peer == rank_) {
      inputs.back() = slice(rank_);
    } else {
      receive(received + static_cast<std::size_t>(peer) * my_bytes, my_bytes, peer);
      send(slice(peer), slice_bytes(peer), peer);
    }
  }
  wait_for_requests();
  reduce_in_order(op, tensor.scalar_type(), inputs, slice(rank_), first(rank_ + 1) - first(rank_));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    receive(slice(peer), slice_bytes(peer), peer);
    send(slice(rank_), my_bytes, peer);
  }
  wait_for_requests();
}

std::unique_ptr<Work> MpiGroup::do_reduce_scatter(at::Tensor output, at::Tensor input,
                                                  ReduceOp op) {
  return submit([this, output = std::move(output), input = std::move(input), op] {
    const std::size_t num_bytes = output.nbytes();
    std::byte* received = scratch(num_bytes * static_cast<std::size_t>(size_));
    std::vector<const void*> inputs;
    for (int peer = 0; peer < size_; ++peer) {
      const std::size_t offset = static_cast<std::size_t>(peer) * num_bytes;
      inputs.push_back(peer == rank_ ? bytes_of(input) + offset : received + offset);
      if (peer == rank_) continue;
      receive(received + offset, num_bytes, peer);
      send(bytes_of(input) + offset, num_bytes, peer);
    }
    wait_for_requests();
    reduce_in_order(op, output.scalar_type(), inputs, bytes_of(output), output.numel());
  });
}

std::unique_ptr<Work> MpiGroup::do_all_gather(at::Tensor output, at::Tensor input) {
  return submit([this, output = std::move(output), input = std::move(input)] {
    const std::size_t num_bytes = input.nbytes();
    for (int peer = 0; peer < size_; ++peer) {
      std::byte* slice = bytes_of(output) + static_cast<std::size_t>(peer) * num_bytes;
      if (peer == rank_) {
        copy_bytes(slice, bytes_of(input), num_bytes);
      } else {
        receive(slice, num_bytes, peer);
        send(bytes_of(input), num_bytes, peer);
      }
    }
    wait_for_requests();
  });
}

std::unique_ptr<Work> MpiGroup::do_all_to_all(at::Tensor output,
                                              std::vector<std::int64_t> receive_counts,
                                              at::Tensor input,
                                              std::vector<std::int64_t> send_counts) {
  return submit([this, output = std::move(output), input = std::move(input),
                 receive_counts = std::move(receive_counts), send_counts = std::move(send_counts)] {
    std::byte* to = bytes_of(output);
    const std::byte* from = bytes_of(input);
    for (int peer = 0; peer < size_; ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      const std::size_t num_received =
          static_cast<std::size_t>(receive_counts[p]) * output.itemsize();
      const std::size_t num_sent = static_cast<std::size_t>(send_counts[p]) * input.itemsize();
      if (peer == rank_) {
        copy_bytes(to, from, num_sent);
      } else {
        receive(to, num_received, peer);
        send(from, num_sent, peer);
      }
      to += num_received;
      from += num_sent;
    }
    wait_for_requests();
  });
}

std::unique_ptr<Work> MpiGroup::do_broadcast(at::Tensor tensor, int root) {
  return submit([this, tensor = std::move(tensor), root] {
    constexpr std::size_t kMaxBytes = std::size_t{1} << 30;
    for (std::size_t start = 0; start < tensor.nbytes(); start += kMaxBytes) {
      const std::size_t num_bytes = std::min(kMaxBytes, tensor.nbytes() - start);
      requests_.emplace_back();
      mpi_check(MPI_Ibcast(bytes_of(tensor) + start, static_cast<int>(num_bytes), MPI_BYTE, root,
                           comm_, &requests_.back()),
                "MPI_Ibcast");
    }
    wait_for_requests();
  });
}

std::unique_ptr<Work> MpiGroup::do_barrier() {
  return submit([this] {
    requests_.emplace_back();
    mpi_check(MPI_Ibarrier(comm_, &requests_.back()), "MPI_Ibarrier");
    wait_for_requests();
  });
}

// ---- Transfers

// MPI keeps messages with the same tag between two ranks in order. The tag identifies their
// operation.
void MpiGroup::send(const std::byte* data, std::size_t num_bytes, int peer) {
  for (std::size_t start = 0; start < num_bytes; start += kPieceBytes) {
    const int count = static_cast<int>(std::min(kPieceBytes, num_bytes - start));
    requests_.emplace_back();
    mpi_check(MPI_Isend(data + start, count, MPI_BYTE, peer, tag_, comm_, &requests_.back()),
              "MPI_Isend");
  }
}

void MpiGroup::receive(std::byte* data, std::size_t num_bytes, int peer) {
  for (std::size_t start = 0; start < num_bytes; start += kPieceBytes) {
    const int count = static_cast<int>(std::min(kPieceBytes, num_bytes - start));
    requests_.emplace_back();
    mpi_check(MPI_Irecv(data + start, count, MPI_BYTE, peer, tag_, comm_, &requests_.back()),
              "MPI_Irecv");
  }
}

void MpiGroup::wait_for_requests() {
  const int num_requests = static_cast<int>(requests_.size());
  std::vector<int> completed(requests_.size());
  PollPause pause;
  for (int num_left = num_requests; num_left > 0;) {
    int num_completed = 0;
    mpi_check(MPI_Testsome(num_requests, requests_.data(), &num_completed, completed.data(),
                           MPI_STATUSES_IGNORE),
              "MPI_Testsome");
    if (num_completed > 0) {
      num_left -= num_completed;
      pause.restart();
    } else if (abandoned_) {
      fail(ExitCode::kPeer, "the group was abandoned while an operation was running");
    } else {
      pause();
    }
  }
  requests_.clear();
}

std::byte* MpiGroup::scratch(std::size_t num_bytes) {
  if (num_bytes > scratch_bytes_) {
    scratch_ = std::make_unique_for_overwrite<std::byte[]>(num_bytes);
    scratch_bytes_ = num_bytes;
  }
  return scratch_.get();
}

}  // namespace birkhoff
