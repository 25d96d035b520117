// Where the time of a program goes on a GPU, kernel by kernel. A library that the CUDA driver loads
// into any program when it starts, so it also sees LibTorch's kernels:
//   CUDA_INJECTION64_PATH=.../libkernel_trace.so birkhoff bench step ...
// When the program ends, it prints tables in Markdown to stderr: one for each recorded graph, with
// the means of its replays, then one of all that was launched outside of graphs. Times are those of
// CUPTI's activity records. CUPTI's library must be in the program, as LibTorch's is, or in
// LD_LIBRARY_PATH.
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Sum {
  std::int64_t launches = 0;
  std::uint64_t nanoseconds = 0;
};

// What the replays of one graph launched, or with number 0, what was launched outside of graphs.
struct Graph {
  std::map<std::string, Sum> kernels;
  std::map<std::uint64_t, std::int64_t> launches_of_node;
};

struct Trace {
  std::mutex mutex;
  std::map<std::uint32_t, Graph> graphs;
  std::size_t lost = 0;  // records
};

// Never destroyed: CUPTI's thread may deliver records while the program ends.
Trace& trace() {
  static Trace& trace = *new Trace;
  return trace;
}

template <typename Record>
void add(const CUpti_Activity* activity, const std::string& name) {
  const auto& record = *reinterpret_cast<const Record*>(activity);
  if (record.end == 0) return;  // CUPTI has no time for it
  Graph& graph = trace().graphs[record.graphId];
  Sum& sum = graph.kernels[name];
  ++sum.launches;
  sum.nanoseconds += record.end - record.start;
  ++graph.launches_of_node[record.graphNodeId];
}

void provide_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* max_records) {
  *size = std::size_t{8} << 20;
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, *size));
  *max_records = 0;  // as many as fit
}

void read_buffer(CUcontext context, std::uint32_t stream, std::uint8_t* buffer, std::size_t,
                 std::size_t size) {
  const std::lock_guard lock(trace().mutex);
  CUpti_Activity* activity = nullptr;
  while (cuptiActivityGetNextRecord(buffer, size, &activity) == CUPTI_SUCCESS) {
    switch (activity->kind) {
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
        add<CUpti_ActivityKernel10>(
            activity, reinterpret_cast<const CUpti_ActivityKernel10*>(activity)->name);
        break;
      case CUPTI_ACTIVITY_KIND_MEMCPY:
        add<CUpti_ActivityMemcpy6>(activity, "copy");
        break;
      case CUPTI_ACTIVITY_KIND_MEMSET:
        add<CUpti_ActivityMemset4>(activity, "fill");
        break;
      default:
        break;
    }
  }
  std::size_t lost = 0;
  if (cuptiActivityGetNumDroppedRecords(context, stream, &lost) == CUPTI_SUCCESS) {
    trace().lost += lost;
  }
  std::free(buffer);
}

// The beginning of a kernel's name as in the source, without the namespaces that all share.
std::string shown(const std::string& name) {
  int status = 0;
  char* plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string text = status == 0 ? plain : name;
  std::free(plain);
  for (const std::string part : {"(anonymous namespace)::", "birkhoff::", "void "}) {
    for (std::size_t at; (at = text.find(part)) != std::string::npos;) text.erase(at, part.size());
  }
  return text.substr(0, 110);
}

void print(std::uint32_t number, const Graph& graph) {
  std::int64_t replays = 1;
  if (number != 0) {
    for (const auto& [node, launches] : graph.launches_of_node) {
      replays = std::max(replays, launches);
    }
  }
  const double runs = static_cast<double>(replays);
  double launches = 0, microseconds = 0;
  std::map<std::string, Sum> kernels;  // by the names that are shown
  for (const auto& [name, sum] : graph.kernels) {
    Sum& each = kernels[shown(name)];
    each.launches += sum.launches;
    each.nanoseconds += sum.nanoseconds;
    launches += static_cast<double>(sum.launches) / runs;
    microseconds += static_cast<double>(sum.nanoseconds) * 1e-3 / runs;
  }
  if (number == 0) {
    std::fprintf(stderr, "\nOutside of graphs: %.0f launches, %.0f us\n", launches, microseconds);
  } else {
    std::fprintf(stderr, "\nA replay of graph %u, mean of %.0f: %.0f launches, %.0f us\n", number,
                 runs, launches, microseconds);
  }
  std::fprintf(stderr, "\n| kernel | launches | us | share |\n|---|---:|---:|---:|\n");
  std::vector<std::pair<std::string, Sum>> rows(kernels.begin(), kernels.end());
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
    return a.second.nanoseconds > b.second.nanoseconds;
  });
  for (const auto& [name, sum] : rows) {
    const double time = static_cast<double>(sum.nanoseconds) * 1e-3 / runs;
    std::fprintf(stderr, "| `%s` | %.1f | %.1f | %.3f |\n", name.c_str(),
                 static_cast<double>(sum.launches) / runs, time, time / microseconds);
  }
}

void print_all() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  const std::lock_guard lock(trace().mutex);
  for (const auto& [number, graph] : trace().graphs) {
    if (number != 0) print(number, graph);
  }
  if (trace().graphs.contains(0)) print(0, trace().graphs[0]);
  if (trace().lost > 0) std::fprintf(stderr, "\nCUPTI lost %zu records.\n", trace().lost);
}

}  // namespace

// The driver calls it before anything else of CUDA runs. 0: it failed.
extern "C" int InitializeInjection() {
  CUptiResult result = cuptiActivityRegisterCallbacks(provide_buffer, read_buffer);
  for (const CUpti_ActivityKind kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                        CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET}) {
    if (result == CUPTI_SUCCESS) result = cuptiActivityEnable(kind);
  }
  if (result == CUPTI_SUCCESS) return std::atexit(print_all) == 0;
  const char* why = "";
  cuptiGetResultString(result, &why);
  std::fprintf(stderr, "kernel_trace: CUPTI: %s\n", why);
  return 0;
}
