#include "cluster/base/gpu/device_timer.h"

#include <chrono>

#ifdef BIRKHOFF_CUDA
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "cluster/base/gpu/check.h"
#include "cluster/base/gpu/handles.h"
#endif

namespace birkhoff {

class DeviceTimer::Impl {
  using Clock = std::chrono::steady_clock;

 public:
#ifdef BIRKHOFF_CUDA
  explicit Impl(at::Device device) {
    if (!device.is_cuda()) return;
    for (UniqueHandle<CudaEventTraits>* event : {&began_, &ended_}) {
      cudaEvent_t made = nullptr;
      cuda_check(cudaEventCreate(&made), "cudaEventCreate");
      event->reset(made);
    }
  }

  void mark(bool end) {
    if (began_) {
      cuda_check(cudaEventRecord((end ? ended_ : began_).get(),
                                 c10::cuda::getCurrentCUDAStream().stream()),
                 "cudaEventRecord");
    }
    (end ? end_ : begin_) = Clock::now();
  }

  double seconds() const {
    if (!began_) return std::chrono::duration<double>(end_ - begin_).count();
    cuda_check(cudaEventSynchronize(ended_.get()), "cudaEventSynchronize");
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, began_.get(), ended_.get()), "cudaEventElapsedTime");
    return ms / 1000;
  }

 private:
  UniqueHandle<CudaEventTraits> began_, ended_;
#else
  explicit Impl(at::Device) {}
  void mark(bool end) { (end ? end_ : begin_) = Clock::now(); }
  double seconds() const { return std::chrono::duration<double>(end_ - begin_).count(); }

 private:
#endif
  Clock::time_point begin_, end_;
};

DeviceTimer::DeviceTimer(at::Device device) : impl_(std::make_unique<Impl>(device)) {}
DeviceTimer::~DeviceTimer() = default;
void DeviceTimer::start() { impl_->mark(/*end=*/false); }
void DeviceTimer::stop() { impl_->mark(/*end=*/true); }
double DeviceTimer::seconds() const { return impl_->seconds(); }

}  // namespace birkhoff
