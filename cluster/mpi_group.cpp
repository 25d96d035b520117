#include "cluster/mpi_group.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "cluster/base/collectives/reduce.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// MPI counts are int. Each completed message also shows the waiting thread that data is flowing.
constexpr std::size_t kMessageBytes = std::size_t{1} << 20;

// How long a poll keeps the core, and then how long it yields the core, before it sleeps.
struct Patience {
  std::chrono::microseconds keeps, yields;
};
// While other threads of the process compute.
constexpr Patience kWhileOthersCompute{std::chrono::microseconds(0), std::chrono::microseconds(20)};
// While a thread waits for the operation. With 200 us, two ranks on two cores of a virtual machine
// were 7 % slower (docs/results.md, "Two ranks").
constexpr Patience kAwaited{std::chrono::microseconds(5), std::chrono::milliseconds(50)};
// If a yield takes longer and another thread ran meanwhile, that thread computes on the core, and
// the wait sleeps. (A virtual machine's core may also have stood still.)
constexpr std::chrono::microseconds kLongYield(500);

// How often another thread took the core from this one, also by its yields.
std::int64_t num_switches() {
  rusage usage{};
  ::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

// Pauses after a poll that found nothing: not at all at first, then yields the core, then sleeps
// for a sixteenth of the time waited so far. So no wait grows by more than a sixteenth, and one of
// seconds costs almost nothing. The time starts again with each message and when a thread begins to
// wait. After the first polls it counts as waited, of the thread that polls. Only a caller that
// runs its operation itself reads that.
class PollPause {
 public:
  explicit PollPause(OperationQueue& queue) : queue_(queue) {}
  void restart() { waits_ = false; }
  // The first polls do not read the clock: that takes a tenth of a small message's time.
  void operator()() {
    using std::chrono::microseconds;
    if (++num_calls_ <= kFreeCalls) return;
    if (!timer_) timer_.emplace();
    const Clock::time_point now = Clock::now();
    const bool awaited = queue_.awaited();
    if (!waits_ || awaited != awaited_) start_ = now;
    if (awaited && !awaited_) shares_core_ = false;  // the thread that now waits had the core
    waits_ = true;
    awaited_ = awaited;
    const Patience& patience = awaited ? kAwaited : kWhileOthersCompute;
    const auto waited = std::chrono::duration_cast<microseconds>(now - start_);
    if (waited < patience.keeps) return;
    if (waited < patience.yields && !shares_core_) {
      const std::int64_t before = num_switches();
      ::sched_yield();
      shares_core_ = Clock::now() - now > kLongYield && num_switches() > before;
    } else {
      queue_.sleep(std::clamp(waited / 16, microseconds(20), microseconds(500)));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  OperationQueue& queue_;
  static constexpr int kFreeCalls = 16;
  int num_calls_ = 0;
  std::optional<WaitTimer> timer_;
  bool waits_ = false, awaited_ = false, shares_core_ = false;
  Clock::time_point start_{};
};

}  // namespace

MpiGroup::MpiGroup(MPI_Comm parent, int node_ranks) {
  mpi_check(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
  mpi_check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  mpi_check(MPI_Comm_rank(comm_, &ranks_.rank), "MPI_Comm_rank");
  mpi_check(MPI_Comm_size(comm_, &ranks_.size), "MPI_Comm_size");
  ranks_.node_ranks = node_ranks;
  require(node_ranks >= 1 && ranks_.size % ranks_.node_ranks == 0,
          "MpiGroup: node_ranks must divide the ranks");
}

MpiGroup::~MpiGroup() {
  abandoned_ = queue_.busy();
  queue_.stop();
  if (requests_.empty()) {
    MPI_Comm_free(&comm_);
  } else {
    // Never freed: MPI may still write into them.
    for (Buffer& buffer : buffers_) (void)buffer.data.release();
  }
}

// ---- Operations

class MpiGroup::MpiTransfers : public Transfers {
 public:
  explicit MpiTransfers(MpiGroup& group) : group_(group) {}
  void add(int peer, const Piece& send, const Piece& receive) override {
    group_.start_transfers(peer, send, receive);
  }
  void run() override { group_.wait_for_requests(); }
  std::byte* memory(std::size_t num_bytes) override { return group_.scratch(num_bytes); }
  void reduce_rows(const std::byte* rows, int num_rows, ReduceOp op, at::ScalarType dtype,
                   const Piece& output) override {
    std::vector<const void*> inputs;
    for (int i = 0; i < num_rows; ++i) {
      inputs.push_back(rows + static_cast<std::size_t>(i) * output.num_bytes);
    }
    reduce_in_order(op, dtype, inputs, output.data,
                    static_cast<std::int64_t>(output.num_bytes / c10::elementSize(dtype)));
  }

 private:
  MpiGroup& group_;
};

template <typename Operation>
std::unique_ptr<Work> MpiGroup::submit(Operation operation) {
  const auto begin = [this, tag = operation_tag()] {
    tag_ = tag;
    num_buffers_ = 0;
  };
  if (!caller_waits()) {
    return queue_.submit([begin, operation = std::move(operation)] {
      begin();
      operation();
    });
  }
  queue_.run_here(operation, begin);
  return nullptr;
}

std::unique_ptr<Work> MpiGroup::do_all_reduce(at::Tensor tensor, ReduceOp op) {
  return submit([this, tensor = std::move(tensor), op] {
    if (size() == 1) return;
    const bool small =
        is_small(static_cast<std::int64_t>(tensor.nbytes()), size(), /*on_gpus=*/false);
    if (ranks_.two_levels()) {
      MpiTransfers transfers(*this);
      return all_reduce_in_levels(transfers, ranks_, tensor, op, small);
    }
    if (small) {
      const Piece whole{bytes_of(tensor), tensor.nbytes()};
      return reduce_pieces([&](int) { return whole; }, op, tensor.scalar_type(), whole.data);
    }
    // Each rank owns and reduces one slice.
    const auto slice = [&](int of) { return slice_of(tensor, size(), of); };
    const Piece mine = slice(rank());
    reduce_pieces(slice, op, tensor.scalar_type(), mine.data);
    exchange([&](int) { return mine; }, slice);
  });
}

std::unique_ptr<Work> MpiGroup::do_reduce_scatter(at::Tensor output, at::Tensor input,
                                                  ReduceOp op) {
  return submit([this, output = std::move(output), input = std::move(input), op] {
    if (ranks_.two_levels()) {
      MpiTransfers transfers(*this);
      return reduce_scatter_in_levels(transfers, ranks_, output, input, op);
    }
    reduce_pieces([&](int to) { return slice_of(input, size(), to); }, op, input.scalar_type(),
                  bytes_of(output));
  });
}

std::unique_ptr<Work> MpiGroup::do_all_gather(at::Tensor output, at::Tensor input) {
  return submit([this, output = std::move(output), input = std::move(input)] {
    if (ranks_.two_levels()) {
      MpiTransfers transfers(*this);
      return all_gather_in_levels(transfers, ranks_, output, input);
    }
    const Piece mine{bytes_of(input), input.nbytes()};
    exchange([&](int) { return mine; }, [&](int from) { return slice_of(output, size(), from); });
  });
}

std::unique_ptr<Work> MpiGroup::do_all_to_all(at::Tensor output, Counts receive_counts,
                                              at::Tensor input, Counts send_counts) {
  // The tensors own what the pieces point to. They are copied, because captures may be initialized
  // in any order.
  return submit([this, sends = pieces_of(input, send_counts),
                 receives = pieces_of(output, receive_counts), output, input] {
    exchange([&](int to) { return sends[static_cast<std::size_t>(to)]; },
             [&](int from) { return receives[static_cast<std::size_t>(from)]; });
  });
}

std::unique_ptr<Work> MpiGroup::do_broadcast(at::Tensor tensor, int root) {
  return submit([this, tensor = std::move(tensor), root] {
    if (is_small(static_cast<std::int64_t>(tensor.nbytes()), size(), /*on_gpus=*/false)) {
      const Piece whole{bytes_of(tensor), tensor.nbytes()}, nothing{};
      return exchange([&](int) { return rank() == root ? whole : nothing; },
                      [&](int from) { return from == root ? whole : nothing; });
    }
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

template <typename SendOf, typename ReceiveOf>
void MpiGroup::exchange(const SendOf& send_of, const ReceiveOf& receive_of) {
  // This rank's own piece last: the others need not wait until it is copied.
  for (int i = 1; i <= size(); ++i) {
    const int peer = (rank() + i) % size();
    start_transfers(peer, send_of(peer), receive_of(peer));
  }
  wait_for_requests();
}

void MpiGroup::start_transfers(int peer, const Piece& out, const Piece& in) {
  if (peer == rank()) {
    if (in.data != out.data && in.num_bytes > 0) std::memcpy(in.data, out.data, in.num_bytes);
    return;
  }
  // One thread at a time is here, so that no atomic addition is needed.
  const auto add = [&](std::atomic<std::int64_t>& count) {
    count.store(count + static_cast<std::int64_t>(out.num_bytes), std::memory_order_relaxed);
  };
  add(bytes_sent_);
  if (peer / ranks_.node_ranks != ranks_.node()) add(bytes_between_nodes_);
  // MPI keeps messages with the same tag between two ranks in order. The tag identifies their
  // operation.
  transfer(in, "MPI_Irecv", [&](std::byte* data, int count, MPI_Request* request) {
    return MPI_Irecv(data, count, MPI_BYTE, peer, tag_, comm_, request);
  });
  transfer(out, "MPI_Isend", [&](std::byte* data, int count, MPI_Request* request) {
    return MPI_Isend(data, count, MPI_BYTE, peer, tag_, comm_, request);
  });
}

template <typename SendOf>
void MpiGroup::reduce_pieces(const SendOf& send_of, ReduceOp op, at::ScalarType dtype,
                             std::byte* output) {
  const Piece mine = send_of(rank());
  std::byte* received = scratch(mine.num_bytes * static_cast<std::size_t>(size()));
  const auto receive_of = [&](int from) {
    return from == rank()
               ? mine
               : Piece{received + static_cast<std::size_t>(from) * mine.num_bytes, mine.num_bytes};
  };
  exchange(send_of, receive_of);
  inputs_.clear();
  for (int from = 0; from < size(); ++from) inputs_.push_back(receive_of(from).data);
  reduce_in_order(op, dtype, inputs_, output,
                  static_cast<std::int64_t>(mine.num_bytes / c10::elementSize(dtype)));
}

template <typename Start>
void MpiGroup::transfer(const Piece& piece, const char* call, Start start) {
  for (std::size_t at = 0; at < piece.num_bytes; at += kMessageBytes) {
    const int count = static_cast<int>(std::min(kMessageBytes, piece.num_bytes - at));
    requests_.emplace_back();
    mpi_check(start(piece.data + at, count, &requests_.back()), call);
  }
}

void MpiGroup::wait_for_requests() {
  const int num_requests = static_cast<int>(requests_.size());
  completed_.resize(requests_.size());
  PollPause pause(queue_);
  for (int num_left = num_requests; num_left > 0;) {
    int num_completed = 0;
    mpi_check(MPI_Testsome(num_requests, requests_.data(), &num_completed, completed_.data(),
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
  if (num_buffers_ == buffers_.size()) buffers_.emplace_back();
  Buffer& buffer = buffers_[num_buffers_++];
  if (num_bytes > buffer.num_bytes) {
    buffer = {std::make_unique_for_overwrite<std::byte[]>(num_bytes), num_bytes};
  }
  return buffer.data.get();
}

void mpi_check(int status, const char* call, std::source_location where) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail(ExitCode::kPeer,
       "{} failed: {} ({}:{}); a rank or the network is lost: see the logs of the other ranks",
       call, std::string(text, static_cast<std::size_t>(length)), where.file_name(), where.line());
}

}  // namespace birkhoff
