#include "cluster/base/gpu/handles.h"

#include "cluster/base/gpu/check.h"

namespace birkhoff {

void CudaStreamTraits::close(Handle stream) noexcept { (void)cudaStreamDestroy(stream); }
void CudaEventTraits::close(Handle event) noexcept { (void)cudaEventDestroy(event); }

CudaStream::CudaStream(Priority priority) {
  int least = 0, greatest = 0;  // higher priorities are smaller numbers
  cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
             "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                          priority == Priority::kHigh ? greatest : least),
             "cudaStreamCreateWithPriority");
  stream_.reset(stream);
}

CudaEvent::CudaEvent() {
  cudaEvent_t event = nullptr;
  cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  event_.reset(event);
}

void CudaEvent::record(cudaStream_t stream) {
  cuda_check(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
}

void CudaEvent::hold_back(cudaStream_t stream) const {
  cuda_check(cudaStreamWaitEvent(stream, event_.get()), "cudaStreamWaitEvent");
}

bool CudaEvent::passed() const {
  const cudaError_t status = cudaEventQuery(event_.get());
  if (status == cudaErrorNotReady) return false;
  cuda_check(status, "cudaEventQuery");
  return true;
}

}  // namespace birkhoff
