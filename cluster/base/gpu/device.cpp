#include "cluster/base/gpu/device.h"

#include <fmt/format.h>

#include <cstdint>
#include <fstream>

#include "cluster/base/error.h"

#ifdef BIRKHOFF_CUDA
#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdlib>

#include "cluster/base/gpu/check.h"
#endif

namespace birkhoff {
namespace {

std::string processor_name() {
  std::ifstream lines("/proc/cpuinfo");
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unnamed CPU";  // not every architecture has the line
}

// VmRSS and VmHWM of /proc/self/status, in KiB (proc(5)).
std::string host_memory() {
  std::ifstream status("/proc/self/status");
  double resident = 0, peak = 0;
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") status >> resident;
    if (word == "VmHWM:") status >> peak;
  }
  return fmt::format("{:.1f} MiB resident, {:.1f} MiB at the peak", resident / 1024, peak / 1024);
}

#ifdef BIRKHOFF_CUDA
std::string gpu_memory(at::Device device) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  std::size_t free = 0, total = 0;
  cuda_check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  const auto mebibytes = [](auto bytes) { return static_cast<double>(bytes) / (1 << 20); };
  return fmt::format(
      "{:.1f} MiB of tensors on the GPU, {:.1f} MiB at the peak, {:.1f} MiB reserved; {:.1f} of "
      "{:.1f} MiB free; host {}",
      mebibytes(stats.allocated_bytes[kAll].current), mebibytes(stats.allocated_bytes[kAll].peak),
      mebibytes(stats.reserved_bytes[kAll].current), mebibytes(free), mebibytes(total),
      host_memory());
}

cudaDeviceProp properties_of(at::Device device) {
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, device.index()), "cudaGetDeviceProperties");
  return properties;
}
#endif

}  // namespace

std::string memory_report(at::Device device) {
#ifdef BIRKHOFF_CUDA
  if (device.is_cuda()) return gpu_memory(device);
#endif
  (void)device;
  return host_memory();
}

#ifdef BIRKHOFF_CUDA

int count_cuda_devices() {
  int num_devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&num_devices);
  if (status == cudaSuccess && num_devices > 0) return num_devices;
  (void)cudaGetLastError();  // or the next launch would report it
  fail(ExitCode::kUsage,
       "device: cuda, but there is no usable GPU here ({}): check nvidia-smi and "
       "CUDA_VISIBLE_DEVICES, or use device=cpu (--device cpu)",
       status == cudaSuccess ? "0 devices" : cudaGetErrorString(status));
}

at::Device cuda_device(int local_rank) {
  if (std::getenv("BIRKHOFF_SHARE_GPUS") != nullptr) {
    // NCCL refuses two ranks on one device of a machine, so each rank poses as a machine of its
    // own.
    setenv("NCCL_HOSTID", fmt::format("rank-{}", local_rank).c_str(), /*overwrite=*/0);
    setenv("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/0);
    setenv("NCCL_MNNVL_ENABLE", "0", /*overwrite=*/0);  // all are on one machine
  }
  const int num_devices = count_cuda_devices();
  if (num_devices == 1) local_rank = 0;  // launchers may give each rank its own
  if (local_rank >= num_devices) {
    if (std::getenv("BIRKHOFF_SHARE_GPUS") == nullptr) {
      fail(ExitCode::kUsage,
           "device: cuda, but rank {} of this machine has no GPU of its own (the machine has {}): "
           "start one rank per GPU",
           local_rank, num_devices);
    }
    local_rank %= num_devices;
  }
  // LibTorch's operations must not use float atomics, and cuBLAS needs one workspace per stream, or
  // it may sum in a different order from run to run. Attention's backward passes become
  // deterministic only if a nondeterministic operation is an error (with warn_only they warn and
  // stay as they are).
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);  // costs a pass over memory
  cuda_check(cudaSetDevice(local_rank), "cudaSetDevice");
  const auto device = static_cast<at::DeviceIndex>(local_rank);
  // Autograd records this stream with its nodes, so its threads use it too.
  if (c10::cuda::getCurrentCUDAStream(device) == c10::cuda::getDefaultCUDAStream(device)) {
    c10::cuda::setCurrentCUDAStream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device));
  }
  return {at::kCUDA, device};
}

std::string device_name(at::Device device) {
  if (!device.is_cuda()) return processor_name();
  return properties_of(device).name;
}

std::string gpu_uuid(at::Device device) {
  const cudaDeviceProp properties = properties_of(device);
  std::string text;
  for (const char byte : properties.uuid.bytes) {
    text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  return text;
}

std::string gpu_driver() {
  int driver = 0, library = 0;
  cuda_check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  cuda_check(cudaRuntimeGetVersion(&library), "cudaRuntimeGetVersion");
  const auto text = [](int version) {
    return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
  };
  return fmt::format("{}, library {}", text(driver), text(library));
}

void synchronize(at::Device device) {
  if (!device.is_cuda()) return;
  cuda_check(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream(device.index()).stream()),
             "cudaStreamSynchronize");
}

CUstream_st* current_stream(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.get_device()).stream();
}

#else

int count_cuda_devices() {
  fail(ExitCode::kUsage,
       "device: cuda, but this birkhoff was built without CUDA: build it with ./bootstrap.sh build "
       "--cuda, or use device=cpu (--device cpu)");
}

at::Device cuda_device(int) {
  count_cuda_devices();  // always an error
  return at::kCPU;
}

std::string device_name(at::Device) { return processor_name(); }

std::string gpu_uuid(at::Device) {
  fail(ExitCode::kInternal, "internal error: a build without CUDA has no GPUs");
}

std::string gpu_driver() { return "none"; }

void synchronize(at::Device) {}

#endif

KernelDtype kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return KernelDtype::kFloat;
    case at::kDouble:
      return KernelDtype::kDouble;
    case at::kBFloat16:
      return KernelDtype::kBFloat16;
    case at::kHalf:
      return KernelDtype::kHalf;
    case at::kLong:
      return KernelDtype::kLong;
    default:
      fail(ExitCode::kInternal, "internal error: no kernel takes tensors of {}",
           c10::toString(dtype));
  }
}

bool fits_vectors(const at::Tensor& tensor, std::int64_t num_bytes) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0 && num_bytes % 16 == 0;
}

}  // namespace birkhoff
