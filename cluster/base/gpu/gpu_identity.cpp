#include "cluster/base/gpu/gpu_identity.h"

#include <fmt/format.h>

#include "cluster/base/error.h"

#ifdef BIRKHOFF_CUDA
#include <cuda_runtime_api.h>

#include "cluster/base/gpu/check.h"
#endif

namespace birkhoff {

#ifdef BIRKHOFF_CUDA

std::string gpu_uuid(at::Device device) {
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, device.index()), "cudaGetDeviceProperties");
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

#else

std::string gpu_uuid(at::Device) {
  fail(ExitCode::kInternal, "internal error: a build without CUDA has no GPUs");
}

std::string gpu_driver() { return "none"; }

#endif

}  // namespace birkhoff
