// The identity of a GPU and its software, for reports on the machines of a job. Builds without CUDA
// know no GPU.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace birkhoff {

// The identity of a GPU, which no other GPU of any machine has, in hexadecimal digits. Local.
std::string gpu_uuid(at::Device device);

// The newest CUDA version that this machine's driver supports, and the version of the CUDA library,
// such as "13.0, library 12.6"; "none" in builds without CUDA. Local.
std::string gpu_driver();

}  // namespace birkhoff
