#include "tests/cluster/base/thread_group.h"

#include <ATen/ops/exp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tanh.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "cluster/base/collectives/reduce.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// The tensors that a rank exposes to the other ranks during an operation.
struct Offer {
  const char* operation = "";
  void* data = nullptr;
  std::int64_t count = 0;  // must be equal on all ranks, except for all_to_all
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> send_counts = {}, receive_counts = {};  // of all_to_all
};

// A barrier of all ranks, and their offers.
class Meeting {
 public:
  explicit Meeting(int size) : offers(static_cast<std::size_t>(size)), size_(size) {}

  // Returns when all ranks have arrived. Throws if one has failed or left.
  void arrive() {
    std::unique_lock lock(mutex_);
    if (first_failure_ == nullptr && ++num_arrived_ == size_) {
      num_arrived_ = 0;
      ++round_;
      changed_.notify_all();
      return;
    }
    const std::int64_t round = round_;
    changed_.wait(lock,
                  [&] { return round_ != round || first_failure_ != nullptr || num_left_ > 0; });
    if (round_ != round) return;
    if (first_failure_ != nullptr) fail(ExitCode::kPeer, "another rank of the group failed");
    fail(ExitCode::kInternal, "internal error: a rank returned while others wait for it");
  }

  void leave(const std::exception_ptr& failure) {
    const std::lock_guard lock(mutex_);
    if (failure == nullptr) ++num_left_;
    if (first_failure_ == nullptr) first_failure_ = failure;
    changed_.notify_all();
  }

  std::exception_ptr first_failure() const { return first_failure_; }

  std::vector<Offer> offers;  // written by its rank before arrive(), read by all ranks after

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_arrived_ = 0;
  int num_left_ = 0;
  std::int64_t round_ = 0;
  std::exception_ptr first_failure_;
};

class ThreadGroup : public ProcessGroup {
 public:
  ThreadGroup(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(meeting_.offers.size()); }

 protected:
  std::unique_ptr<Work> do_all_reduce(at::Tensor tensor, ReduceOp op) override {
    const std::int64_t count = tensor.numel();
    offer({"all_reduce", tensor.mutable_data_ptr(), count, tensor.scalar_type()});
    // Each rank reduces its slice and writes it to all ranks' tensors.
    const std::int64_t begin = count * rank_ / size(), end = count * (rank_ + 1) / size();
    const std::size_t begin_byte = static_cast<std::size_t>(begin) * tensor.itemsize();
    const std::size_t num_bytes = static_cast<std::size_t>(end - begin) * tensor.itemsize();
    reduce_offers(op, begin_byte, mine(begin_byte), end - begin);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank_ && num_bytes > 0) {
        std::memcpy(bytes_of(peer) + begin_byte, mine(begin_byte), num_bytes);
      }
    }
    return done();
  }

  std::unique_ptr<Work> do_reduce_scatter(at::Tensor output, at::Tensor input,
                                          ReduceOp op) override {
    offer({"reduce_scatter", input.mutable_data_ptr(), input.numel(), input.scalar_type()});
    // Uses a buffer: the output may be a part of the input that another rank still reads.
    std::vector<char> buffer(output.nbytes());
    reduce_offers(op, static_cast<std::size_t>(rank_) * output.nbytes(), buffer.data(),
                  output.numel());
    meeting_.arrive();
    if (!buffer.empty()) std::memcpy(output.mutable_data_ptr(), buffer.data(), buffer.size());
    return done();
  }

  std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor input) override {
    offer({"all_gather", input.mutable_data_ptr(), input.numel(), input.scalar_type()});
    char* out = static_cast<char*>(output.mutable_data_ptr());
    for (int peer = 0; peer < size(); ++peer) {
      char* slice = out + static_cast<std::size_t>(peer) * input.nbytes();
      if (slice != bytes_of(peer) && input.nbytes() > 0) {
        std::memcpy(slice, bytes_of(peer), input.nbytes());
      }
    }
    return done();
  }

  std::unique_ptr<Work> do_all_to_all(at::Tensor output, Counts receive_counts, at::Tensor input,
                                      Counts send_counts) override {
    offer({"all_to_all",
           input.mutable_data_ptr(),
           0,
           input.scalar_type(),
           {send_counts.begin(), send_counts.end()},
           {receive_counts.begin(), receive_counts.end()}});
    char* out = static_cast<char*>(output.mutable_data_ptr());
    for (int peer = 0; peer < size(); ++peer) {
      const std::vector<std::int64_t>& sent = offer_of(peer).send_counts;
      const std::int64_t start =
          std::accumulate(sent.begin(), sent.begin() + rank_, std::int64_t{0});
      const std::size_t num_bytes =
          static_cast<std::size_t>(sent[static_cast<std::size_t>(rank_)]) * input.itemsize();
      if (num_bytes == 0) continue;
      std::memcpy(out, bytes_of(peer) + static_cast<std::size_t>(start) * input.itemsize(),
                  num_bytes);
      out += num_bytes;
    }
    return done();
  }

  std::unique_ptr<Work> do_broadcast(at::Tensor tensor, int root) override {
    offer({"broadcast", tensor.mutable_data_ptr(), tensor.numel(), tensor.scalar_type()});
    if (rank_ != root && tensor.nbytes() > 0) {
      std::memcpy(tensor.mutable_data_ptr(), bytes_of(root), tensor.nbytes());
    }
    return done();
  }

  std::unique_ptr<Work> do_barrier() override {
    offer({"barrier"});
    return done();
  }

 private:
  // Publishes this rank's offer and waits for the offers of all ranks. All ranks make the same
  // checks, so either all throw or none does, and no rank reads the memory of one that has left.
  void offer(Offer my_offer) {
    meeting_.offers[static_cast<std::size_t>(rank_)] = std::move(my_offer);
    meeting_.arrive();
    const Offer& first = offer_of(0);
    for (int r = 0; r < size(); ++r) {
      const Offer& other = offer_of(r);
      if (std::strcmp(other.operation, first.operation) != 0 || other.count != first.count ||
          other.dtype != first.dtype) {
        fail(ExitCode::kInternal,
             "internal error: rank 0 is in {} of {} elements, rank {} in {} of {}", first.operation,
             first.count, r, other.operation, other.count);
      }
      for (std::size_t peer = 0; peer < other.send_counts.size(); ++peer) {
        require(other.send_counts[peer] ==
                    meeting_.offers[peer].receive_counts[static_cast<std::size_t>(r)],
                "all_to_all: a rank's receive count differs from its peer's send count");
      }
    }
  }
  // No rank may touch its offered memory until all ranks are done.
  std::unique_ptr<Work> done() {
    meeting_.arrive();
    return done_work();
  }
  const Offer& offer_of(int peer) const { return meeting_.offers[static_cast<std::size_t>(peer)]; }
  char* bytes_of(int peer) const { return static_cast<char*>(offer_of(peer).data); }
  char* mine(std::size_t byte) const { return bytes_of(rank_) + byte; }
  void reduce_offers(ReduceOp op, std::size_t first_byte, void* output, std::int64_t count) const {
    std::vector<const void*> inputs;
    for (int peer = 0; peer < size(); ++peer) inputs.push_back(bytes_of(peer) + first_byte);
    reduce_in_order(op, meeting_.offers[0].dtype, inputs, output, count);
  }

  Meeting& meeting_;
  const int rank_;
};

}  // namespace

namespace {

// MKL chooses its code in its first call. On an Intel Xeon threads that raced there got different
// bits; the ranks of a run are processes, whose first call is on one thread.
void compute_before_threads_do() {
  static const bool done = [] {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const at::Tensor x = at::rand({64, 64}, dtype);
      at::mm(x, x).tanh_();
      at::mm(x.narrow(0, 0, 10).narrow(1, 0, 7), x.narrow(0, 0, 7)).exp_();
    }
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace

void run_ranks(int size, const std::function<void(ProcessGroup&)>& function) {
  run_mesh(size, 1, [&](const MeshRank& rank) { function(rank.data); });
}

void run_mesh(int data, int tensor, const std::function<void(const MeshRank&)>& function) {
  require(data >= 1 && tensor >= 1, "run_mesh: at least one rank");
  compute_before_threads_do();
  Meeting all(data * tensor);
  std::deque<Meeting> of_data, of_tensor;  // by the rank on the other axis
  for (int t = 0; t < tensor; ++t) of_data.emplace_back(data);
  for (int d = 0; d < data; ++d) of_tensor.emplace_back(tensor);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < data * tensor; ++rank) {
    threads.emplace_back([&, d = rank / tensor, t = rank % tensor, rank] {
      std::exception_ptr failure;
      Meeting& data_meeting = of_data[static_cast<std::size_t>(t)];
      Meeting& tensor_meeting = of_tensor[static_cast<std::size_t>(d)];
      try {
        ThreadGroup world_group(all, rank), data_group(data_meeting, d),
            tensor_group(tensor_meeting, t);
        function({world_group, data_group, tensor_group});
      } catch (...) {
        failure = std::current_exception();
      }
      // The world first: it keeps the failure that the others follow from.
      for (Meeting* meeting : {&all, &data_meeting, &tensor_meeting}) meeting->leave(failure);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (all.first_failure() != nullptr) std::rethrow_exception(all.first_failure());
}

}  // namespace birkhoff
