#include "runtime/weights/warm_start.h"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/plural.h"
#include "configs/schema/config.pb.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/checkpoint/safetensors.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

struct Rule {
  std::string from, to;
};

std::vector<Rule> rules_of(const configs::WarmStart& warm_start) {
  std::vector<Rule> rules;
  for (const std::string& text : warm_start.rename()) {
    const std::size_t at = text.find('=');
    require(at != std::string::npos && at > 0, "rules of a checked configuration are A=B");
    rules.push_back({text.substr(0, at), text.substr(at + 1)});
  }
  return rules;
}

// The tensors of several files.
class Weights {
 public:
  explicit Weights(const std::vector<fs::path>& files) {
    for (const fs::path& file : files) {
      const SafetensorsReader& reader = readers_.emplace_back(file.string());
      for (const SafetensorsEntry& entry : reader.entries())
        tensors_[entry.name] = {&reader, &entry};
    }
  }

  // Null if there is none of that name.
  const SafetensorsEntry* find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : found->second.entry;
  }
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& [name, tensor] : tensors_) names.insert(name);
    return names;
  }

  // Copies what the part holds of the tensor.
  void read(const std::string& name, TensorPart& part) const {
    constexpr std::int64_t kElements = 1 << 18;  // at a time
    const auto& [reader, entry] = tensors_.at(name);
    const std::int64_t element_bytes = safetensors_element_bytes(entry->dtype);
    const auto bytes = std::make_unique_for_overwrite<std::byte[]>(
        static_cast<std::size_t>(kElements * element_bytes));
    TensorRegion whole = part.region;
    whole.box_offset.assign(whole.global_shape.size(), 0);
    whole.box_size = whole.global_shape;
    whole.flat_begin = 0;
    whole.flat_end = entry->num_bytes() / element_bytes;
    for_each_common_run(whole, part.region, [&](const CommonRun& run) {
      for (std::int64_t done = 0; done < run.length; done += kElements) {
        const std::int64_t count = std::min(kElements, run.length - done);
        reader->read(bytes.get(), static_cast<std::size_t>(count * element_bytes),
                     entry->begin + (run.begin_a + done) * element_bytes);
        part.data.narrow(0, run.begin_b + done, count)
            .copy_(at::from_blob(bytes.get(), {count},
                                 at::TensorOptions(safetensors_scalar_type(entry->dtype))));
      }
    });
  }

 private:
  struct Tensor {
    const SafetensorsReader* reader;
    const SafetensorsEntry* entry;
  };
  std::deque<SafetensorsReader> readers_;
  std::map<std::string, Tensor> tensors_;
};

// Why the tensor of the file cannot be the part's; empty: it can.
std::string mismatch(const SafetensorsEntry* found, const std::string& name,
                     const TensorPart& part) {
  if (found == nullptr) return fmt::format("no tensor {}", name);
  if (found->shape != part.region.global_shape) {
    return fmt::format("{} is [{}] there, and [{}] here", name, fmt::join(found->shape, ", "),
                       fmt::join(part.region.global_shape, ", "));
  }
  if (!c10::isFloatingType(safetensors_scalar_type(found->dtype))) {
    return fmt::format("{} holds {} there", name, found->dtype);
  }
  return "";
}

}  // namespace

std::vector<fs::path> weight_files(const fs::path& from) {
  if (!path_exists(from.string())) {
    fail(ExitCode::kCheckpoint, "train.warm_start.from: {}: there is no such file or folder",
         from.string());
  }
  if (!fs::is_directory(from)) return {from};
  std::optional<CheckpointFolder> checkpoint;
  if (path_exists(RunPaths{from}.checkpoints().string())) {
    checkpoint = find_newest_checkpoint(RunPaths{from}.checkpoints(), /*set_aside=*/false);
    if (!checkpoint) {
      fail(ExitCode::kCheckpoint, "train.warm_start.from: {}: the run has no checkpoint yet",
           from.string());
    }
  } else {
    checkpoint = open_checkpoint(from);
    verify_checkpoint(*checkpoint);
  }
  std::vector<fs::path> files;
  for (const auto& file : checkpoint->manifest.file()) {
    if (file.name().starts_with("model-")) files.push_back(checkpoint->path / file.name());
  }
  return files;
}

WarmStartReport warm_start(const configs::WarmStart& warm_start, const std::vector<fs::path>& files,
                           std::vector<TensorPart>& parts) {
  const std::vector<Rule> rules = rules_of(warm_start);
  const Weights weights(files);
  std::vector<bool> has_fit(rules.size(), false);
  std::set<std::string> unused = weights.names(), taken;
  std::map<std::string, std::string> kept;
  for (TensorPart& part : parts) {
    if (!is_of_model(part.kind)) continue;
    std::string name = part.name;
    const auto rule = std::ranges::find_if(
        rules, [&](const Rule& each) { return part.name.starts_with(each.from); });
    if (rule != rules.end()) {
      has_fit[static_cast<std::size_t>(rule - rules.begin())] = true;
      name = rule->to.empty() ? "" : rule->to + part.name.substr(rule->from.size());
    }
    const std::string why =
        name.empty() ? "left out by a rule" : mismatch(weights.find(name), name, part);
    if (!why.empty()) {
      kept[part.name] = why;
      continue;
    }
    weights.read(name, part);
    taken.insert(part.name);
    unused.erase(name);
  }
  for (std::size_t i = 0; i < rules.size(); ++i) {
    if (has_fit[i]) continue;
    fail(ExitCode::kConfig,
         "train.warm_start.rename: no tensor of this run begins with '{}'; `birkhoff inspect` of a "
         "run lists names",
         rules[i].from);
  }
  if (taken.empty()) {
    fail(ExitCode::kConfig,
         "train.warm_start.from: no tensor in {} has the name and shape of one of this run; for "
         "instance {}: {}; name the tensors with train.warm_start.rename",
         warm_start.from(), kept.begin()->first, kept.begin()->second);
  }
  return {.taken = static_cast<std::int64_t>(taken.size()),
          .kept = {kept.begin(), kept.end()},
          .unused = {unused.begin(), unused.end()}};
}

void start_warm(const configs::WarmStart& from, ProcessGroup& world,
                std::vector<TensorPart>& parts) {
  constexpr char kSeparator = '\0';
  std::string names;
  if (world.rank() == 0) {
    for (const auto& file : weight_files(from.from())) names += file.string() + kSeparator;
  }
  names = world.broadcast_bytes(names, 0, "files of the warm start");
  std::vector<fs::path> files;
  for (std::size_t begin = 0; begin < names.size();) {
    const std::size_t end = names.find(kSeparator, begin);
    files.emplace_back(names.substr(begin, end - begin));
    begin = end + 1;
  }
  const WarmStartReport report = warm_start(from, files, parts);
  if (world.rank() != 0) return;
  constexpr std::size_t kNamed = 8;
  log_info("warm start: {} from {}", counted(report.taken, "tensor"), from.from());
  if (!report.kept.empty()) {
    std::string reasons;
    for (std::size_t i = 0; i < std::min(kNamed, report.kept.size()); ++i) {
      reasons +=
          fmt::format("{}{} ({})", i > 0 ? ", " : "", report.kept[i].first, report.kept[i].second);
    }
    log_warning("warm start: {} with random values: {}{}",
                counted(std::ssize(report.kept), "tensor"), reasons,
                report.kept.size() > kNamed ? ", ..." : "");
  }
  if (!report.unused.empty()) {
    const std::size_t named = std::min(kNamed, report.unused.size());
    log_info(
        "warm start: {} not used: {}{}", counted(std::ssize(report.unused), "tensor"),
        fmt::join(report.unused.begin(), report.unused.begin() + static_cast<long>(named), ", "),
        report.unused.size() > kNamed ? ", ..." : "");
  }
}

}  // namespace birkhoff
