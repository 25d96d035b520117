#include "cluster/nccl_group.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "cluster/base/collectives/gpu_reduce_params.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/check.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kPoll(50);          // between two polls
constexpr milliseconds kWatchPeriod(250);  // between two checks for asynchronous errors
constexpr double kConnectSeconds = 300;    // limit until all ranks have connected
constexpr double kLeaveSeconds = 10;       // limit until the other ranks leave too

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

ncclDataType_t nccl_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kBFloat16:
      return ncclBfloat16;
    default:
      return ncclInt64;  // process_group.h has no other type
  }
}

ncclRedOp_t nccl_operation(ReduceOp op) {
  if (op == ReduceOp::kSum) return ncclSum;
  return op == ReduceOp::kMax ? ncclMax : ncclMin;
}

// The stream and the communicator are created on the current device.
at::Device current(at::Device device) {
  require(device.is_cuda() && device.index() == c10::cuda::current_device(),
          "NcclGroup: the device is not the current one");
  return device;
}

}  // namespace

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown";
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

// ---- Handles

// wait() makes the caller's current stream wait. The handle keeps the tensors until then: if they
// were freed earlier, another operation on the caller's stream could reuse their memory while this
// one runs.
class NcclGroup::StreamWork : public Work {
 public:
  StreamWork(NcclGroup& group, CudaEvent done, std::vector<at::Tensor> tensors)
      : group_(group), done_(std::move(done)), tensors_(std::move(tensors)) {}
  ~StreamWork() override {
    if (tensors_.empty()) return;
    try {
      hold_back();
    } catch (const Error&) {  // the device is lost, and its memory with it
    }
  }
  void wait() override {
    {
      const std::lock_guard lock(group_.mutex_);
      group_.throw_if_failed();
    }
    hold_back();
    tensors_.clear();
  }

 private:
  void hold_back() {
    done_.hold_back(c10::cuda::getCurrentCUDAStream(group_.device_.index()).stream());
  }

  NcclGroup& group_;
  CudaEvent done_;
  std::vector<at::Tensor> tensors_;
};

class NcclGroup::HostWork : public Work {
 public:
  HostWork(NcclGroup& group, CudaEvent done) : group_(group), done_(std::move(done)) {}
  void wait() override { group_.wait_on_host(done_); }

 private:
  NcclGroup& group_;
  CudaEvent done_;
};

// ---- Life

NcclGroup::NcclGroup(ProcessGroup& control, at::Device device, int node_ranks, SumOrder order)
    : device_(current(device)),
      ranks_{.rank = control.rank(), .size = control.size(), .node_ranks = node_ranks},
      order_(order),
      stream_(CudaStream::Priority::kHigh),
      exceptions_at_start_(std::uncaught_exceptions()) {
  require(node_ranks >= 1 && size() % node_ranks == 0,
          "NcclGroup: node_ranks must divide the ranks");
  require(node_ranks == 1 || order == SumOrder::kRanks, "NcclGroup: NCCL knows no node_ranks");
  ncclUniqueId id{};
  if (rank() == 0) {
    const ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess) {
      fail(ExitCode::kPeer, "ncclGetUniqueId failed: {}: {}", ncclGetErrorString(result),
           ncclGetLastError(nullptr));
    }
  }
  const std::string bytes = control.broadcast_bytes(
      std::string(reinterpret_cast<const char*>(&id), sizeof(id)), 0, "nccl id");
  std::memcpy(&id, bytes.data(), sizeof(id));

  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // otherwise a call that waits for dead peers could not be aborted
  {
    const std::lock_guard lock(mutex_);
    settle(ncclCommInitRankConfig(&comm_, size(), id, rank(), &config), "ncclCommInitRankConfig",
           kConnectSeconds);
  }
  watcher_ = std::thread([this] { watch(); });
}

NcclGroup::~NcclGroup() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_changed_.notify_all();
  watcher_.join();
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    abort_locked("an exception is in flight");
    return;
  }
  try {
    settle(ncclCommFinalize(comm_), "ncclCommFinalize", kLeaveSeconds);
    (void)ncclCommDestroy(comm_);
  } catch (const Error&) {  // another rank is gone: settle() has aborted the communicator
  }
}

void NcclGroup::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_changed_.wait_for(lock, kWatchPeriod, [&] { return stopping_; })) {
    if (comm_ == nullptr) continue;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(comm_, &state);
    if (result == ncclSuccess && (state == ncclSuccess || state == ncclInProgress)) continue;
    abort_locked(fmt::format("{}: {}", ncclGetErrorString(result != ncclSuccess ? result : state),
                             ncclGetLastError(comm_)));
  }
}

void NcclGroup::abort(const std::string& reason) {
  interrupted_ = true;
  const std::lock_guard lock(mutex_);
  abort_locked(reason);
}

void NcclGroup::abort_locked(const std::string& reason) {
  if (failure_.empty()) failure_ = reason;
  if (comm_ != nullptr) (void)ncclCommAbort(std::exchange(comm_, nullptr));
}

void NcclGroup::throw_if_failed() const {
  if (failure_.empty()) return;
  fail(ExitCode::kPeer,
       "the NCCL communicator of rank {} was aborted ({}): a rank, a GPU or the network is lost; "
       "see the logs of the other ranks, and set NCCL_DEBUG=WARN",
       rank(), failure_);
}

void NcclGroup::settle(ncclResult_t result, const char* call, double seconds) {
  const auto start = Clock::now();
  while (result == ncclInProgress) {
    if (interrupted_) {
      abort_locked("interrupted");
      throw_if_failed();
    }
    if (seconds > 0 && seconds_since(start) > seconds) {
      abort_locked(fmt::format("{} did not finish within {:.0f} s", call, seconds));
      throw_if_failed();
    }
    std::this_thread::sleep_for(kPoll);
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
    if (asked != ncclSuccess) result = asked;
  }
  if (result == ncclSuccess) return;
  abort_locked(
      fmt::format("{}: {}: {}", call, ncclGetErrorString(result), ncclGetLastError(comm_)));
  throw_if_failed();
}

void NcclGroup::wait_on_host(const CudaEvent& event) {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      throw_if_failed();
    }
    if (event.passed()) return;
    std::this_thread::sleep_for(kPoll);
  }
}

// ---- Transfers

void NcclGroup::run_transfers(const std::vector<Transfer>& transfers) {
  ncclResult_t result = ncclGroupStart();
  const auto add = [&](ncclResult_t added) {
    if (result == ncclSuccess && added != ncclInProgress) result = added;
  };
  for (const auto& [peer, send, receive] : transfers) {
    if (peer == rank()) continue;
    if (send.num_bytes > 0) {
      add(ncclSend(send.data, send.num_bytes, ncclInt8, peer, comm_, stream_.get()));
    }
    if (receive.num_bytes > 0) {
      add(ncclRecv(receive.data, receive.num_bytes, ncclInt8, peer, comm_, stream_.get()));
    }
  }
  const ncclResult_t ended = ncclGroupEnd();
  settle(result != ncclSuccess ? result : ended, "ncclSend and ncclRecv");
  for (const auto& [peer, send, receive] : transfers) {
    if (peer != rank() || send.data == receive.data || send.num_bytes == 0) continue;
    cuda_check(cudaMemcpyAsync(receive.data, send.data, send.num_bytes, cudaMemcpyDeviceToDevice,
                               stream_.get()),
               "cudaMemcpyAsync");
  }
}

void NcclGroup::exchange(const Pieces& sends, const Pieces& receives) {
  std::vector<Transfer> transfers;
  for (std::size_t p = 0; p < sends.size(); ++p) {
    transfers.push_back({static_cast<int>(p), sends[p], receives[p]});
  }
  run_transfers(transfers);
}

void NcclGroup::gather(const std::byte* in, std::byte* out, std::size_t num_bytes) {
  if (num_bytes == 0) return;
  settle(ncclAllGather(in, out, num_bytes, ncclInt8, comm_, stream_.get()), "ncclAllGather");
}

void NcclGroup::reduce_rows(const std::byte* rows, int num_rows, ReduceOp op, at::ScalarType dtype,
                            const Piece& output) {
  const auto count = static_cast<std::int64_t>(output.num_bytes / c10::elementSize(dtype));
  if (count == 0) return;
  launch_reduce({.op = op,
                 .dtype = kernel_dtype(dtype),
                 .inputs = rows,
                 .output = output.data,
                 .num_inputs = num_rows,
                 .count = count},
                stream_.get());
}

// Inside submit().
class NcclGroup::NcclTransfers : public Transfers {
 public:
  explicit NcclTransfers(NcclGroup& group) : group_(group) {}
  void add(int peer, const Piece& send, const Piece& receive) override {
    added_.push_back({peer, send, receive});
  }
  void run() override { group_.run_transfers(std::exchange(added_, {})); }
  std::byte* memory(std::size_t num_bytes) override {
    const auto bytes = at::TensorOptions(at::kByte).device(group_.device_);
    return bytes_of(
        buffers_.emplace_back(at::empty({static_cast<std::int64_t>(num_bytes)}, bytes)));
  }
  void reduce_rows(const std::byte* rows, int num_rows, ReduceOp op, at::ScalarType dtype,
                   const Piece& output) override {
    group_.reduce_rows(rows, num_rows, op, dtype, output);
  }

 private:
  NcclGroup& group_;
  std::vector<Transfer> added_;
  std::vector<at::Tensor> buffers_;
};

// ---- Operations

std::byte* NcclGroup::exchange_into_rows(NcclTransfers& transfers, const Pieces& sends) {
  const std::size_t num_bytes = sends[static_cast<std::size_t>(rank())].num_bytes;
  std::byte* rows = transfers.memory(num_bytes * sends.size());
  for (std::size_t p = 0; p < sends.size(); ++p) {
    transfers.add(static_cast<int>(p), sends[p], {rows + p * num_bytes, num_bytes});
  }
  transfers.run();
  return rows;
}

template <typename Operation>
CudaEvent NcclGroup::submit(Operation operation) {
  const std::lock_guard lock(mutex_);
  throw_if_failed();
  const c10::cuda::CUDAGuard on_device(device_);  // backward passes run on threads of their own
  CudaEvent ready, done;
  ready.record(c10::cuda::getCurrentCUDAStream(device_.index()).stream());
  ready.hold_back(stream_.get());
  {
    const c10::cuda::CUDAStreamGuard guard(
        c10::cuda::getStreamFromExternal(stream_.get(), device_.index()));
    operation();
  }
  done.record(stream_.get());
  return done;
}

template <typename Operation>
std::unique_ptr<Work> NcclGroup::submit_for(std::vector<at::Tensor> tensors, Operation operation) {
  require(tensors[0].device() == device_, "NcclGroup: the tensor is not on the group's GPU");
  CudaEvent done = submit(operation);
  return std::make_unique<StreamWork>(*this, std::move(done), std::move(tensors));
}

std::unique_ptr<Work> NcclGroup::do_all_reduce(at::Tensor tensor, ReduceOp op) {
  return submit_for({tensor}, [&] {
    if (size() == 1 || tensor.numel() == 0) return;
    if (order_ == SumOrder::kNccl) {
      return settle(
          ncclAllReduce(tensor.const_data_ptr(), tensor.mutable_data_ptr(),
                        static_cast<std::size_t>(tensor.numel()), nccl_type(tensor.scalar_type()),
                        nccl_operation(op), comm_, stream_.get()),
          "ncclAllReduce");
    }
    const auto ranks = static_cast<std::size_t>(size());
    const bool small =
        is_small(static_cast<std::int64_t>(tensor.nbytes()), size(), /*on_gpus=*/true);
    NcclTransfers transfers(*this);
    if (ranks_.two_levels()) return all_reduce_in_levels(transfers, ranks_, tensor, op, small);
    if (small) {
      std::byte* rows = transfers.memory(tensor.nbytes() * ranks);
      gather(bytes_of(tensor), rows, tensor.nbytes());
      return reduce_rows(rows, size(), op, tensor.scalar_type(),
                         {bytes_of(tensor), tensor.nbytes()});
    }
    // Each rank owns and reduces one slice.
    const Pieces slices = slices_of(tensor, size());
    const Piece& mine = slices[static_cast<std::size_t>(rank())];
    const std::byte* rows = exchange_into_rows(transfers, slices);
    reduce_rows(rows, size(), op, tensor.scalar_type(), mine);
    if (tensor.numel() % size() == 0) {
      gather(mine.data, bytes_of(tensor), mine.num_bytes);
    } else {
      exchange(Pieces(ranks, mine), slices);
    }
  });
}

std::unique_ptr<Work> NcclGroup::do_reduce_scatter(at::Tensor output, at::Tensor input,
                                                   ReduceOp op) {
  return submit_for({output, input}, [&] {
    if (output.numel() == 0) return;
    if (order_ == SumOrder::kNccl) {
      return settle(ncclReduceScatter(input.const_data_ptr(), output.mutable_data_ptr(),
                                      static_cast<std::size_t>(output.numel()),
                                      nccl_type(input.scalar_type()), nccl_operation(op), comm_,
                                      stream_.get()),
                    "ncclReduceScatter");
    }
    NcclTransfers transfers(*this);
    if (ranks_.two_levels()) {
      return reduce_scatter_in_levels(transfers, ranks_, output, input, op);
    }
    const std::byte* rows = exchange_into_rows(transfers, slices_of(input, size()));
    reduce_rows(rows, size(), op, input.scalar_type(), {bytes_of(output), output.nbytes()});
  });
}

std::unique_ptr<Work> NcclGroup::do_all_gather(at::Tensor output, at::Tensor input) {
  return submit_for({output, input}, [&] {
    if (!ranks_.two_levels() || input.numel() == 0) {
      return gather(bytes_of(input), bytes_of(output), input.nbytes());
    }
    NcclTransfers transfers(*this);
    all_gather_in_levels(transfers, ranks_, output, input);
  });
}

std::unique_ptr<Work> NcclGroup::do_all_to_all(at::Tensor output, Counts receive_counts,
                                               at::Tensor input, Counts send_counts) {
  return submit_for({output, input}, [&] {
    exchange(pieces_of(input, send_counts), pieces_of(output, receive_counts));
  });
}

std::unique_ptr<Work> NcclGroup::do_broadcast(at::Tensor tensor, int root) {
  return submit_for({tensor}, [&] {
    if (tensor.numel() == 0) return;
    settle(ncclBroadcast(tensor.const_data_ptr(), tensor.mutable_data_ptr(), tensor.nbytes(),
                         ncclInt8, root, comm_, stream_.get()),
           "ncclBroadcast");
  });
}

std::unique_ptr<Work> NcclGroup::do_barrier() {
  CudaEvent done = submit([&] {
    const at::Tensor signs = at::empty({size() + 1}, at::TensorOptions(at::kByte).device(device_));
    gather(bytes_of(signs) + size(), bytes_of(signs), 1);
  });
  return std::make_unique<HostWork>(*this, std::move(done));
}

}  // namespace birkhoff
