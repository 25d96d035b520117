#include "runtime/step_graph.h"

#include "cluster/base/error.h"

#ifdef BIRKHOFF_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <memory>
#include <string>
#endif

namespace birkhoff {
namespace {

#ifdef BIRKHOFF_CUDA
void record(at::cuda::CUDAGraph& graph, const std::function<void()>& part) {
  // A recording keeps memory of its own for good: let it have what the warm-up needed.
  c10::cuda::CUDACachingAllocator::emptyCache();
  // Other threads, of checkpoints or NCCL, may use the device meanwhile.
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  std::string failure;
  ExitCode code = ExitCode::kInternal;
  try {
    part();
  } catch (const c10::OutOfMemoryError& error) {
    failure = error.what_without_backtrace();
    code = ExitCode::kMemory;
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  // Also ends a failed recording: otherwise the stream stays closed to everything else.
  try {
    graph.capture_end();
  } catch (const c10::Error& error) {
    if (failure.empty()) failure = error.what_without_backtrace();
  }
  if (!failure.empty()) {
    fail(code,
         "train.cuda_graph: a step could not be recorded: {}; set train.cuda_graph=false to train "
         "without it",
         failure);
  }
}
#endif

void require_alike(const at::Tensor& a, const at::Tensor& b) {
  require(a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device(),
          "train.cuda_graph: a batch differs from the first in shape, type or device");
}

}  // namespace

void StepGraph::run(const std::function<void()>& part) {
  if (!recorded_ || num_runs_ < kWarmUpRuns) {
    ++num_runs_;
    return part();
  }
  if (!replay_) {
    replay_ = part;
#ifdef BIRKHOFF_CUDA
    if (device_.is_cuda()) {
      const auto graph = std::make_shared<at::cuda::CUDAGraph>();
      // Kept alive from here on: the allocator queries even a graph whose recording failed.
      replay_ = [graph] { graph->replay(); };
      record(*graph, part);
    }
#endif
  }
  replay_();
}

const Batch& StaticBatch::hold(const Batch& batch) {
  held_.global_size = batch.global_size;
  held_.num_documents = batch.num_documents;
  if (!held_.sample_ids_B.defined()) {
    for (const auto& [name, tensor] : batch.fields) {
      held_.fields[name] = tensor.clone(at::MemoryFormat::Contiguous);
    }
    held_.sample_ids_B = batch.sample_ids_B.clone();
    return held_;
  }
  require(batch.fields.size() == held_.fields.size(),
          "train.cuda_graph: a batch does not have the fields of the first");
  const auto copy = [](const at::Tensor& to, const at::Tensor& from) {
    require_alike(to, from);
    to.copy_(from, /*non_blocking=*/true);
  };
  for (const auto& [name, tensor] : batch.fields) copy(held_.at(name), tensor);
  copy(held_.sample_ids_B, batch.sample_ids_B);
  return held_;
}

}  // namespace birkhoff
