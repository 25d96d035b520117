#include "launcher/bench/operation_profile.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "launcher/measure/report.h"

namespace birkhoff {
namespace {

struct OpenOperation : at::ObserverContext {
  std::string name;
  double start = 0, children = 0;
};

struct SelfTime {
  double seconds = 0;
  int calls = 0;
};

// LibTorch's callbacks are plain functions, so an object cannot hold their results.
thread_local std::vector<OpenOperation*> open_operations;
thread_local std::map<std::string, SelfTime> self_times;

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  auto operation = std::make_unique<OpenOperation>();
  operation->name = function.name();
  operation->start = wall_seconds();
  open_operations.push_back(operation.get());
  return operation;
}

void leave(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* operation = static_cast<OpenOperation*>(context);
  const double seconds = wall_seconds() - operation->start;
  open_operations.pop_back();
  if (!open_operations.empty()) open_operations.back()->children += seconds;
  SelfTime& time = self_times[operation->name];
  time.seconds += seconds - operation->children;
  ++time.calls;
}

}  // namespace

std::string operation_profile(const std::function<void()>& work) {
  constexpr int kRuns = 10;
  constexpr std::size_t kMaxRows = 16;
  self_times.clear();
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(enter, leave));
  for (int i = 0; i < kRuns; ++i) work();
  at::removeCallback(handle);
  std::vector<std::pair<std::string, SelfTime>> rows(self_times.begin(), self_times.end());
  std::sort(rows.begin(), rows.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  rows.resize(std::min(rows.size(), kMaxRows));
  std::string table = table_head({"operation", "self time, ms", "calls"});
  for (const auto& [name, time] : rows) {
    table +=
        table_row({name, figure(time.seconds / kRuns * 1e3), std::to_string(time.calls / kRuns)});
  }
  return table;
}

}  // namespace birkhoff
