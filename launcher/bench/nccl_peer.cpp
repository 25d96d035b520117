#include <nccl.h>

#include <cstring>
#include <memory>
#include <string>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "launcher/bench/collectives.h"

namespace birkhoff {
namespace {

void nccl_check(ncclResult_t result, const char* call) {
  if (result == ncclSuccess) return;
  fail(ExitCode::kPeer, "{} failed: {}: {}", call, ncclGetErrorString(result),
       ncclGetLastError(nullptr));
}

struct Communicator {
  explicit Communicator(ProcessGroup& control) {
    ncclUniqueId id{};
    if (control.rank() == 0) nccl_check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    const std::string bytes = control.broadcast_bytes(
        std::string(reinterpret_cast<const char*>(&id), sizeof id), 0, "peer's nccl id");
    std::memcpy(&id, bytes.data(), sizeof id);
    nccl_check(ncclCommInitRank(&comm, control.size(), id, control.rank()), "ncclCommInitRank");
  }
  // Unlike ncclCommDestroy, ncclCommAbort does not wait for ranks that may have failed.
  ~Communicator() { (void)ncclCommAbort(comm); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  ncclComm_t comm = nullptr;
};

// NCCL has no such call, so use one send and one receive per rank, as in nccl-tests.
void all_to_all(ncclComm_t comm, int ranks, const at::Tensor& output, const at::Tensor& input,
                cudaStream_t stream) {
  const std::size_t part =
      static_cast<std::size_t>(input.numel()) / static_cast<std::size_t>(ranks);
  auto* to = output.mutable_data_ptr<float>();
  const auto* from = input.const_data_ptr<float>();
  nccl_check(ncclGroupStart(), "ncclGroupStart");
  for (int peer = 0; peer < ranks; ++peer, to += part, from += part) {
    nccl_check(ncclSend(from, part, ncclFloat, peer, comm, stream), "ncclSend");
    nccl_check(ncclRecv(to, part, ncclFloat, peer, comm, stream), "ncclRecv");
  }
  nccl_check(ncclGroupEnd(), "ncclGroupEnd");
}

}  // namespace

RunCollective nccl_collectives(ProcessGroup& control, at::Device device) {
  require(device.is_cuda(), "NCCL's peer without a GPU");
  const auto communicator = std::make_shared<Communicator>(control);
  const int ranks = control.size();
  return [communicator, ranks](Collective what, const at::Tensor& output, const at::Tensor& input) {
    const ncclComm_t comm = communicator->comm;
    const cudaStream_t stream = current_stream(output);
    void* const to = output.mutable_data_ptr();
    const void* const from = input.defined() ? input.const_data_ptr() : nullptr;
    const auto count = static_cast<std::size_t>(output.numel());
    switch (what) {
      case Collective::kAllReduce:
        return nccl_check(ncclAllReduce(to, to, count, ncclFloat, ncclSum, comm, stream),
                          "ncclAllReduce");
      case Collective::kReduceScatter:
        return nccl_check(ncclReduceScatter(from, to, count, ncclFloat, ncclSum, comm, stream),
                          "ncclReduceScatter");
      case Collective::kAllGather:
        return nccl_check(ncclAllGather(from, to, static_cast<std::size_t>(input.numel()),
                                        ncclFloat, comm, stream),
                          "ncclAllGather");
      case Collective::kAllToAll:
        return all_to_all(comm, ranks, output, input, stream);
      case Collective::kBroadcast:
        return nccl_check(ncclBroadcast(to, to, count, ncclFloat, 0, comm, stream),
                          "ncclBroadcast");
    }
  };
}

}  // namespace birkhoff
