#include "cluster/base/gpu/check.h"

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

ExitCode exit_code(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return ExitCode::kMemory;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDevice:
    case cudaErrorSystemDriverMismatch:
      return ExitCode::kUsage;
    default:
      return ExitCode::kInternal;
  }
}

}  // namespace

void cuda_check(cudaError_t status, const char* call, std::source_location where) {
  if (status == cudaSuccess) return;
  fail(exit_code(status), "{} failed: {}: {} ({}:{})", call, cudaGetErrorName(status),
       cudaGetErrorString(status), where.file_name(), where.line());
}

void cuda_check_launch(cudaStream_t stream, std::source_location where) {
  cuda_check(cudaGetLastError(), "kernel launch", where);
#ifdef BIRKHOFF_SYNC_LAUNCHES
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  cuda_check(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing", where);
  if (capturing == cudaStreamCaptureStatusNone) {
    cuda_check(cudaStreamSynchronize(stream), "kernel", where);
  }
#else
  (void)stream;
#endif
}

}  // namespace birkhoff
