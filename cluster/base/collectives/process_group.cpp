#include "cluster/base/collectives/process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"

namespace birkhoff {
namespace {

thread_local double waited_by_thread = 0;  // seconds

// Keeps the ring's record of an operation up to date while the caller waits.
class RecordedWork : public Work {
 public:
  RecordedWork(std::unique_ptr<Work> work, OperationRing& ring, std::int64_t sequence)
      : work_(std::move(work)), ring_(ring), sequence_(sequence) {}
  void wait() override {
    ring_.begin_waiting(sequence_);
    try {
      const WaitTimer timer;
      work_->wait();
    } catch (...) {
      ring_.stop_waiting();
      throw;
    }
    ring_.finish(sequence_);
  }

 private:
  std::unique_ptr<Work> work_;
  OperationRing& ring_;
  std::int64_t sequence_;
};

// Misuse is a bug in the caller: every check names the operation and its purpose.
void check(bool condition, std::string_view operation, std::string_view name, const char* what) {
  if (!condition) fail(ExitCode::kInternal, "internal error: {} '{}': {}", operation, name, what);
}

void check_tensor(const at::Tensor& tensor, std::string_view operation, std::string_view name) {
  check(tensor.defined(), operation, name, "undefined tensor");
  check(tensor.is_contiguous(), operation, name, "the tensor is not contiguous");
  const at::ScalarType dtype = tensor.scalar_type();
  check(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kLong,
        operation, name, "dtype must be fp32, fp64, bf16 or int64");
}

void check_pair(const at::Tensor& output, const at::Tensor& input, std::string_view operation,
                std::string_view name) {
  check_tensor(output, operation, name);
  check_tensor(input, operation, name);
  check(output.scalar_type() == input.scalar_type(), operation, name,
        "input and output differ in dtype");
  check(output.device() == input.device(), operation, name, "input and output differ in device");
}

void check_counts(const at::Tensor& tensor, std::span<const std::int64_t> counts, int size,
                  std::string_view name) {
  check(tensor.dim() == 1, "all_to_all", name, "tensors must be 1-D");
  check(static_cast<int>(counts.size()) == size, "all_to_all", name,
        "one count per rank is needed");
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) {
    check(count >= 0, "all_to_all", name, "a count is negative");
    sum += count;
  }
  check(sum == tensor.numel(), "all_to_all", name,
        "the counts do not add up to the tensor's length");
}

// int64 [num_words] that holds the bytes, zero-padded.
at::Tensor pack(const std::string& bytes, std::int64_t num_words) {
  at::Tensor words = at::zeros({num_words}, at::TensorOptions().dtype(at::kLong));
  if (!bytes.empty()) std::memcpy(words.mutable_data_ptr(), bytes.data(), bytes.size());
  return words;
}

std::int64_t num_words(std::int64_t num_bytes) { return (num_bytes + 7) / 8; }

at::Tensor scalar(std::int64_t value) {
  at::Tensor tensor = at::empty({1}, at::TensorOptions().dtype(at::kLong));
  *tensor.mutable_data_ptr<std::int64_t>() = value;
  return tensor;
}

class DoneWork : public Work {
 public:
  void wait() override {}
};

class SingleGroup : public ProcessGroup {
 public:
  explicit SingleGroup(at::Device device) : device_(device) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  at::Device device() const override { return device_; }

 protected:
  std::unique_ptr<Work> do_all_reduce(at::Tensor, ReduceOp) override { return done_work(); }
  std::unique_ptr<Work> do_reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp) override {
    return copy(output, input);
  }
  std::unique_ptr<Work> do_all_gather(at::Tensor output, at::Tensor input) override {
    return copy(output, input);
  }
  std::unique_ptr<Work> do_all_to_all(at::Tensor output, Counts, at::Tensor input,
                                      Counts) override {
    return copy(output, input);
  }
  std::unique_ptr<Work> do_broadcast(at::Tensor, int) override { return done_work(); }
  std::unique_ptr<Work> do_barrier() override { return done_work(); }

 private:
  static std::unique_ptr<Work> copy(at::Tensor& output, const at::Tensor& input) {
    if (output.data_ptr() != input.data_ptr()) {
      output.detach().view({-1}).copy_(input.detach().view({-1}));
    }
    return done_work();
  }

  const at::Device device_;
};

}  // namespace

double waited_seconds() { return waited_by_thread; }

WaitTimer::~WaitTimer() {
  waited_by_thread += std::chrono::duration<double>(Clock::now() - start_).count();
}

std::unique_ptr<Work> done_work() { return std::make_unique<DoneWork>(); }

// ---- OperationRing

std::int64_t OperationRing::start(std::string_view operation, std::string_view name,
                                  const at::Tensor& tensor, bool waiting) {
  const std::lock_guard lock(mutex_);
  const std::int64_t sequence = next_++;
  Entry& entry = ring_[static_cast<std::size_t>(sequence) % kCapacity];
  entry.sequence = sequence;
  entry.operation = operation;
  entry.name = name;
  entry.shape.clear();
  entry.bytes = 0;
  if (tensor.defined()) {
    entry.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
    entry.bytes = static_cast<std::int64_t>(tensor.nbytes());
  }
  entry.waiting = waiting;
  entry.done = false;
  if (waiting) waiting_ = sequence;
  return sequence;
}

void OperationRing::begin_waiting(std::int64_t sequence) {
  const std::lock_guard lock(mutex_);
  Entry& entry = ring_[static_cast<std::size_t>(sequence) % kCapacity];
  if (entry.sequence == sequence) entry.waiting = true;
  waiting_ = sequence;
}

void OperationRing::stop_waiting() {
  const std::lock_guard lock(mutex_);
  if (waiting_ < 0) return;
  ring_[static_cast<std::size_t>(waiting_) % kCapacity].waiting = false;
  waiting_ = -1;
}

void OperationRing::finish(std::int64_t sequence) {
  const std::lock_guard lock(mutex_);
  Entry& entry = ring_[static_cast<std::size_t>(sequence) % kCapacity];
  if (entry.sequence == sequence) {
    entry.waiting = false;
    entry.done = true;
  }
  waiting_ = -1;
}

std::vector<OperationRing::Entry> OperationRing::entries() const {
  const std::lock_guard lock(mutex_);
  const auto capacity = static_cast<std::int64_t>(kCapacity);
  std::vector<Entry> result;
  for (std::int64_t s = std::max<std::int64_t>(0, next_ - capacity); s < next_; ++s) {
    result.push_back(ring_[static_cast<std::size_t>(s) % kCapacity]);
  }
  return result;
}

OperationRing::Entry OperationRing::current() const {
  const std::lock_guard lock(mutex_);
  const std::int64_t sequence = waiting_ >= 0 ? waiting_ : next_ - 1;
  return sequence < 0 ? Entry() : ring_[static_cast<std::size_t>(sequence) % kCapacity];
}

std::int64_t OperationRing::total_operations() const {
  const std::lock_guard lock(mutex_);
  return next_;
}

// ---- ProcessGroup

void ProcessGroup::start(std::string_view operation, std::string_view name,
                         const at::Tensor& tensor) {
  sequence_ = ring_.start(operation, name, tensor, caller_waits_);
  std::uint32_t crc = crc32c(&sequence_, sizeof(sequence_));
  crc = crc32c(operation.data(), operation.size(), crc);
  crc = crc32c(name.data(), name.size(), crc);
  operation_tag_ = static_cast<int>(crc % 32768);
}

std::unique_ptr<Work> ProcessGroup::recorded(std::unique_ptr<Work> work) {
  if (caller_waits_) return work;  // start_and_wait() records it
  return std::make_unique<RecordedWork>(std::move(work), ring_, sequence_);
}

template <typename Start>
void ProcessGroup::start_and_wait(const Start& start) {
  caller_waits_ = true;
  try {
    const std::unique_ptr<Work> work = start();
    caller_waits_ = false;
    if (work != nullptr) {
      const WaitTimer timer;
      work->wait();
    }
  } catch (...) {
    caller_waits_ = false;
    ring_.stop_waiting();
    throw;
  }
  ring_.finish(sequence_);
}

std::unique_ptr<Work> ProcessGroup::all_reduce_async(at::Tensor tensor, ReduceOp op,
                                                     std::string_view name) {
  check_tensor(tensor, "all_reduce", name);
  start("all_reduce", name, tensor);
  return recorded(do_all_reduce(std::move(tensor), op));
}

void ProcessGroup::all_reduce(at::Tensor tensor, ReduceOp op, std::string_view name) {
  start_and_wait([&] { return all_reduce_async(std::move(tensor), op, name); });
}

std::unique_ptr<Work> ProcessGroup::reduce_scatter_async(at::Tensor output, at::Tensor input,
                                                         ReduceOp op, std::string_view name) {
  check_pair(output, input, "reduce_scatter", name);
  check(input.numel() == size() * output.numel(), "reduce_scatter", name,
        "the input must have size() times the output's elements");
  start("reduce_scatter", name, input);
  return recorded(do_reduce_scatter(std::move(output), std::move(input), op));
}

void ProcessGroup::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op,
                                  std::string_view name) {
  start_and_wait(
      [&] { return reduce_scatter_async(std::move(output), std::move(input), op, name); });
}

std::unique_ptr<Work> ProcessGroup::all_gather_async(at::Tensor output, at::Tensor input,
                                                     std::string_view name) {
  check_pair(output, input, "all_gather", name);
  check(output.numel() == size() * input.numel(), "all_gather", name,
        "the output must have size() times the input's elements");
  start("all_gather", name, input);
  return recorded(do_all_gather(std::move(output), std::move(input)));
}

void ProcessGroup::all_gather(at::Tensor output, at::Tensor input, std::string_view name) {
  start_and_wait([&] { return all_gather_async(std::move(output), std::move(input), name); });
}

std::unique_ptr<Work> ProcessGroup::all_to_all_async(at::Tensor output,
                                                     std::span<const std::int64_t> receive_counts,
                                                     at::Tensor input,
                                                     std::span<const std::int64_t> send_counts,
                                                     std::string_view name) {
  check_pair(output, input, "all_to_all", name);
  check_counts(output, receive_counts, size(), name);
  check_counts(input, send_counts, size(), name);
  const auto self = static_cast<std::size_t>(rank());
  check(receive_counts[self] == send_counts[self], "all_to_all", name,
        "a rank must receive from itself what it sends to itself");
  start("all_to_all", name, input);
  return recorded(do_all_to_all(std::move(output), receive_counts, std::move(input), send_counts));
}

void ProcessGroup::all_to_all(at::Tensor output, std::span<const std::int64_t> receive_counts,
                              at::Tensor input, std::span<const std::int64_t> send_counts,
                              std::string_view name) {
  start_and_wait([&] {
    return all_to_all_async(std::move(output), receive_counts, std::move(input), send_counts, name);
  });
}

void ProcessGroup::broadcast(at::Tensor tensor, int root, std::string_view name) {
  check_tensor(tensor, "broadcast", name);
  check(root >= 0 && root < size(), "broadcast", name, "root is not a rank of the group");
  start_and_wait([&] {
    start("broadcast", name, tensor);
    return recorded(do_broadcast(std::move(tensor), root));
  });
}

void ProcessGroup::barrier(std::string_view name) {
  start_and_wait([&] {
    start("barrier", name, at::Tensor());
    return recorded(do_barrier());
  });
}

std::vector<std::string> ProcessGroup::all_gather_bytes(const std::string& mine,
                                                        std::string_view name) {
  const auto num_ranks = static_cast<std::size_t>(size());
  const auto options = at::TensorOptions().dtype(at::kLong).device(device());
  at::Tensor lengths = at::empty({size()}, options);
  all_gather(lengths, scalar(static_cast<std::int64_t>(mine.size())).to(device()), name);
  lengths = lengths.cpu();
  const std::int64_t* length = lengths.const_data_ptr<std::int64_t>();
  const std::int64_t most_words = num_words(*std::max_element(length, length + num_ranks));
  at::Tensor gathered = at::empty({size() * most_words}, options);
  all_gather(gathered, pack(mine, most_words).to(device()), name);
  gathered = gathered.cpu();
  const char* bytes = static_cast<const char*>(gathered.const_data_ptr());
  std::vector<std::string> result;
  for (std::size_t r = 0; r < num_ranks; ++r) {
    result.emplace_back(bytes + r * 8 * static_cast<std::size_t>(most_words),
                        static_cast<std::size_t>(length[r]));
  }
  return result;
}

std::string ProcessGroup::broadcast_bytes(const std::string& mine, int root,
                                          std::string_view name) {
  at::Tensor length = scalar(static_cast<std::int64_t>(mine.size())).to(device());
  broadcast(length, root, name);
  const std::int64_t num_bytes = *length.cpu().const_data_ptr<std::int64_t>();
  at::Tensor words = pack(rank() == root ? mine : std::string(), num_words(num_bytes)).to(device());
  broadcast(words, root, name);
  words = words.cpu();
  return {static_cast<const char*>(words.const_data_ptr()), static_cast<std::size_t>(num_bytes)};
}

bool any_rank(ProcessGroup& group, bool mine, std::string_view name) {
  if (group.size() == 1) return mine;
  const at::Tensor votes = at::full({1}, static_cast<std::int64_t>(mine), at::kLong);
  group.all_reduce(votes, ReduceOp::kMax, name);
  return votes.item<std::int64_t>() != 0;
}

std::unique_ptr<ProcessGroup> make_single_group(at::Device device) {
  return std::make_unique<SingleGroup>(device);
}

}  // namespace birkhoff
