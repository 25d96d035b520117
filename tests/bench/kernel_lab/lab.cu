// main() of the programs of the kernel lab, and their shared functions.
#include "tests/bench/kernel_lab/lab.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace birkhoff {

// Instead of cluster/base/gpu/check.cpp, which needs libfmt.
void cuda_check(cudaError_t status, const char* call, std::source_location where) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s failed: %s: %s (%s:%u)\n", call, cudaGetErrorName(status),
               cudaGetErrorString(status), where.file_name(), where.line());
  std::exit(2);
}
void check_launch_fits(std::int64_t, std::size_t shared_bytes, std::size_t most_shared,
                       std::source_location where) {
  if (shared_bytes <= most_shared) return;
  std::fprintf(stderr, "%s:%u: this GPU has too little shared memory\n", where.file_name(),
               where.line());
  std::exit(1);
}

void cuda_check_launch(cudaStream_t, std::source_location where) {
  cuda_check(cudaGetLastError(), "kernel launch", where);
}

namespace lab {
namespace {

// Seconds of `work` on a stream: median of `rounds` replays of a graph.
double seconds_of(const std::function<void(cudaStream_t)>& work, int rounds) {
  cudaStream_t stream;
  cuda_check(cudaStreamCreate(&stream), "cudaStreamCreate");
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  work(stream);
  cuda_check(cudaStreamEndCapture(stream, &graph), "capture");
  cuda_check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  cudaEvent_t begin, end;
  cuda_check(cudaEventCreate(&begin), "cudaEventCreate");
  cuda_check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int round = -2; round < rounds; ++round) {
    cuda_check(cudaEventRecord(begin, stream), "cudaEventRecord");
    cuda_check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    cuda_check(cudaEventRecord(end, stream), "cudaEventRecord");
    cuda_check(cudaEventSynchronize(end), "replay");
    float milliseconds = 0;
    cuda_check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    if (round >= 0) times.push_back(milliseconds);
  }
  cuda_check(cudaEventDestroy(begin), "cudaEventDestroy");
  cuda_check(cudaEventDestroy(end), "cudaEventDestroy");
  cuda_check(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy");
  cuda_check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  cuda_check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<std::size_t>(rounds / 2)] * 1e-3;
}

constexpr int kRounds = 7;

// 1,024 float4 a block. A recorded cudaMemcpyAsync is a fifth slower on an H100.
__global__ void __launch_bounds__(256) copy_kernel(const float4* from, float4* to) {
  const std::int64_t first = std::int64_t{blockIdx.x} * 1024 + threadIdx.x;
  float4 rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = from[first + 256 * i];
  for (int i = 0; i < 4; ++i) to[first + 256 * i] = rows[i];
}

}  // namespace

Lab::Lab(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--once") == 0) {
      once_ = true;
    } else if (argv[i][0] == '-') {
      std::fprintf(stderr,
                   "unknown option %s\nusage: %s [--once] [TEXT...]: the cases whose kernel and "
                   "shape contain each TEXT; --once: one launch each, for profilers\n",
                   argv[i], argv[0]);
      std::exit(2);
    } else {
      filters_.emplace_back(argv[i]);
    }
  }
  cudaDeviceProp properties;
  cuda_check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  card_ = properties.name;
  l2_bytes_ = properties.l2CacheSize;
  if (once_) return;
  const Array<float4> from(1 << 25), to(1 << 25);
  from.poison();
  const double seconds = seconds_of(
      [&](cudaStream_t stream) { copy_kernel<<<1 << 15, 256, 0, stream>>>(from.get(), to.get()); },
      kRounds);
  copy_speed_ = 2 * static_cast<double>(from.bytes()) / seconds;
  std::printf("%s: copy of 512 MiB at %.3f TB/s, L2 cache of %.0f MB\n\n", card_.c_str(),
              copy_speed_ * 1e-12, static_cast<double>(l2_bytes_) * 1e-6);
  std::printf(
      "| GPU | kernel | shape | us | MB | share of copy speed | TFLOP/s | predicted us | "
      "errors / bound | same bits |\n|---|---|---|---:|---:|---:|---:|---:|---|---|\n");
}

bool Lab::wants(const std::string& kernel, const std::string& shape) const {
  return std::all_of(filters_.begin(), filters_.end(), [&](const std::string& each) {
    return (kernel + " " + shape).find(each) != std::string::npos;
  });
}

int Lab::copies(std::int64_t bytes) const {
  if (once_) return 1;
  return static_cast<int>(
             std::clamp<std::int64_t>(3 * l2_bytes_ / std::max<std::int64_t>(bytes, 1), 1, 127)) +
         1;
}

double Lab::microseconds(const Case& each, int copies) const {
  const int launches = std::max(copies, 20) / copies * copies;
  return 1e6 / launches *
         seconds_of(
             [&](cudaStream_t stream) {
               for (int i = 0; i < launches; ++i) each.launch(i % copies, stream);
             },
             kRounds);
}

std::string Lab::check(const Case& each) const {
  std::string errors;
  bool same = true;
  for (const Output& out : each.outputs) out.poison();
  each.launch(0, nullptr);
  cuda_check(cudaDeviceSynchronize(), "kernel");
  std::vector<std::uint64_t> first;
  bool failed = false;
  for (const Output& out : each.outputs) {
    first.push_back(out.checksum());
    const Distance kernel = out.kernel();
    const double ratio = kernel.error / (2 * out.rounded().error + out.epsilon * kernel.largest);
    char text[64];
    std::snprintf(text, sizeof text, "%s%s %.2f", errors.empty() ? "" : ", ", out.name.c_str(),
                  ratio);
    errors += text;
    failed = failed || !(ratio <= 1);
  }
  for (const Output& out : each.outputs) out.poison();
  each.launch(0, nullptr);
  for (std::size_t i = 0; i < first.size(); ++i)
    same = same && each.outputs[i].checksum() == first[i];
  if (each.outputs.empty()) return "| |";
  return (failed ? "FAILED: " : "") + errors + " | " + (same ? "yes" : "NO") + " |";
}

void Lab::run(const Case& each) {
  if (once_) {
    each.launch(0, nullptr);
    cuda_check(cudaDeviceSynchronize(), "kernel");
    return;
  }
  const std::string checked = check(each);
  if (checked.find("FAILED") != std::string::npos || checked.find("NO |") != std::string::npos) {
    failed_ = 1;
  }
  const double time = microseconds(each, copies(each.copy_bytes));
  // Memory-bound kernels take 1.25 times their bytes at copy speed, and 2 us
  // (docs/benchmarks/gpu.md, "Bounds by counting").
  std::printf("| %s | %s | %s | %.2f | %.1f | %.2f | %.1f | %.1f | %s\n", card_.c_str(),
              each.kernel.c_str(), each.shape.c_str(), time, each.bytes * 1e-6,
              each.bytes / (time * 1e-6) / copy_speed_, each.flops / (time * 1e-6) * 1e-12,
              1.25e6 * each.bytes / copy_speed_ + 2, checked.c_str());
  std::fflush(stdout);
}

}  // namespace lab
}  // namespace birkhoff

int main(int argc, char** argv) {
  birkhoff::lab::Lab lab(argc, argv);
  birkhoff::lab::cases(lab);
  return lab.exit_code();
}
