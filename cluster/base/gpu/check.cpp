#include "cluster/base/gpu/check.h"

#include <limits>

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

void check_launch_fits(std::int64_t blocks, std::size_t shared_bytes, std::size_t most_shared,
                       std::source_location where) {
  if (blocks > std::numeric_limits<std::int32_t>::max()) {
    fail(ExitCode::kUsage,
         "a kernel ({}:{}) would have {} blocks of threads, more than a GPU can number; lower "
         "train.micro_batch, or the length of sequences",
         where.file_name(), where.line(), blocks);
  }
  if (shared_bytes > most_shared) {
    fail(ExitCode::kUsage,
         "a kernel ({}:{}) needs {} KiB of shared memory for a block of threads, and this GPU has "
         "{}; use shorter attention blocks or narrower heads, or a GPU with more, such as an A100 "
         "or H100",
         where.file_name(), where.line(), (shared_bytes + 1023) / 1024, most_shared / 1024);
  }
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
