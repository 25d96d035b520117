// Forward and backward of the baby GPT (4 layers, 4 heads, 128 channels, 65 ids), without optimizer
// and loader: how fast the network itself is. Usage: OMP_NUM_THREADS=N model_step_bench [batch].
// Prints wall and processor time of the fastest of many repetitions (processor time hardly depends
// on what else runs), then where the time goes by operation.
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <map>

#include "configs/config_io.h"
#include "models/model.h"

namespace birkhoff {
namespace {

double processor_seconds() {
  return static_cast<double>(std::clock()) / static_cast<double>(CLOCKS_PER_SEC);
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Self time of each operation: children are taken from their parents.
struct Profile : at::ObserverContext {
  std::string name;
  double start = 0, children = 0;
};
thread_local std::vector<Profile*> open_operations;
std::map<std::string, std::pair<double, int>> self_seconds;

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  auto profile = std::make_unique<Profile>();
  profile->name = function.name();
  profile->start = wall_seconds();
  open_operations.push_back(profile.get());
  return profile;
}

void leave(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* profile = static_cast<Profile*>(context);
  const double seconds = wall_seconds() - profile->start;
  open_operations.pop_back();
  if (!open_operations.empty()) open_operations.back()->children += seconds;
  auto& [total, calls] = self_seconds[profile->name];
  total += seconds - profile->children;
  ++calls;
}

void print_profile(const std::function<void()>& step) {
  constexpr int kSteps = 20;
  self_seconds.clear();
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(enter, leave));
  for (int i = 0; i < kSteps; ++i) step();
  at::removeCallback(handle);
  std::vector<std::pair<double, std::string>> rows;
  for (const auto& [name, row] : self_seconds) {
    rows.emplace_back(row.first, fmt::format("{:8.3f} ms {:4d} calls  {}", row.first / kSteps * 1e3,
                                             row.second / kSteps, name));
  }
  std::sort(rows.rbegin(), rows.rend());
  for (std::size_t i = 0; i < std::min<std::size_t>(rows.size(), 16); ++i) {
    fmt::print("  {}\n", rows[i].second);
  }
}

void measure(std::int64_t tokens, std::int64_t batch_size) {
  const configs::Config config = parse_config(
      fmt::format("task {{ language_model {{}} }} data {{ corpus: 'none' sequence_length: {} }}",
                  tokens),
      "bench", {});
  const auto group = make_single_group();
  const auto model = make_model(config, /*vocabulary=*/65, {*group, *group, *group});
  Batch batch;
  batch.fields[std::string(field::kInputs)] = at::randint(65, {batch_size, tokens}, at::kLong);
  batch.fields[std::string(field::kTargets)] = at::randint(65, {batch_size, tokens}, at::kLong);
  batch.fields[std::string(field::kMask)] = at::ones({batch_size, tokens}, at::kByte);
  batch.sample_ids_B = at::arange(batch_size, at::kLong);
  const auto step = [&] {
    for (const Parameter& parameter : model->parameters().list()) {
      parameter.value.mutable_grad().reset();
    }
    model->objective(batch, std::nullopt).loss.backward();
  };
  constexpr int kRepetitions = 30, kSteps = 5;
  double wall = 1e9, processor = 1e9;
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    const double wall_start = wall_seconds(), processor_start = processor_seconds();
    for (int i = 0; i < kSteps; ++i) step();
    wall = std::min(wall, (wall_seconds() - wall_start) / kSteps);
    processor = std::min(processor, (processor_seconds() - processor_start) / kSteps);
  }
  fmt::print(
      "T={} B={} threads={}: {:.2f} ms wall, {:.2f} ms processor, {:.0f} tokens/s, {:.1f} "
      "GFLOP/s\n",
      tokens, batch_size, at::get_num_threads(), wall * 1e3, processor * 1e3,
      static_cast<double>(batch_size * tokens) / wall,
      3 * model->forward_flops_per_sequence() * static_cast<double>(batch_size) / wall / 1e9);
  print_profile(step);
}

}  // namespace
}  // namespace birkhoff

int main(int argc, char** argv) {
  const std::int64_t batch_size = argc > 1 ? std::atoi(argv[1]) : 12;
  birkhoff::measure(64, batch_size);
  birkhoff::measure(256, batch_size);
}
