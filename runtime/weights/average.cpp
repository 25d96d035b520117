#include "runtime/weights/average.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <map>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/safetensors.h"

namespace birkhoff {
namespace {

// A tensor of a model, without its values.
struct TensorKind {
  StateKind kind;
  std::string dtype;
  std::vector<std::int64_t> shape;

  bool operator==(const TensorKind&) const = default;
  std::string text() const { return fmt::format("{} [{}]", dtype, fmt::join(shape, ", ")); }
};
using ModelTensors = std::map<std::string, TensorKind>;

ModelTensors tensors_of(const CheckpointFolder& checkpoint) {
  ModelTensors tensors;
  for (const auto& tensor : checkpoint.manifest.tensor()) {
    const StateKind kind = kind_of(tensor.kind());
    if (!is_of_model(kind)) continue;
    tensors[tensor.name()] = {kind, tensor.dtype(), region_of(tensor).global_shape};
  }
  return tensors;
}

void require_same_tensors(const CheckpointFolder& first, const CheckpointFolder& other) {
  const ModelTensors expected = tensors_of(first), tensors = tensors_of(other);
  const auto refuse = [&](const std::string& name, const std::string& here,
                          const std::string& there) {
    fail(ExitCode::kCheckpoint,
         "{}: tensor '{}' is {}, but in {} {}: only checkpoints of one model can be averaged",
         other.path.string(), name, here, first.path.string(), there);
  };
  for (const auto& [name, kind] : expected) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) refuse(name, "missing", kind.text());
    if (!(found->second == kind)) refuse(name, found->second.text(), kind.text());
  }
  for (const auto& [name, kind] : tensors) {
    if (expected.count(name) == 0) refuse(name, kind.text(), "missing");
  }
}

std::vector<TensorPart> empty_parts(const ModelTensors& tensors) {
  std::vector<TensorPart> parts;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor values = at::empty(tensor.shape, safetensors_scalar_type(tensor.dtype));
    parts.push_back(whole_part(name, tensor.kind, values, /*owner=*/0));
  }
  return parts;
}

}  // namespace

std::filesystem::path average_checkpoints(const std::vector<CheckpointFolder>& checkpoints,
                                          const std::filesystem::path& folder) {
  require(!checkpoints.empty(), "average_checkpoints: none");
  for (const CheckpointFolder& checkpoint : checkpoints)
    require_same_tensors(checkpoints.front(), checkpoint);

  std::vector<TensorPart> parts = empty_parts(tensors_of(checkpoints.front()));
  load_model_tensors(checkpoints.front(), parts);
  if (checkpoints.size() > 1) {
    std::vector<at::Tensor> sums;
    for (const TensorPart& part : parts)
      sums.push_back(part.data.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true));
    for (std::size_t c = 1; c < checkpoints.size(); ++c) {
      load_model_tensors(checkpoints[c], parts);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].data.is_floating_point()) sums[i] += parts[i].data;
      }
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].data.is_floating_point())
        parts[i].data.copy_(sums[i] / static_cast<double>(checkpoints.size()));
    }
  }

  const CheckpointFolder& last = checkpoints.back();
  CheckpointHeader header = last.manifest;
  header.clear_held_out_loss();  // of the last model, not of the mean
  header.clear_lowest_loss();
  header.clear_stale_evaluations();
  header.clear_evaluation_due();
  std::vector<std::filesystem::path> tokenizer_files;
  for (const std::string& name : {header.tokenizer_file(), header.source_tokenizer().file()}) {
    if (!name.empty()) tokenizer_files.push_back(last.path / name);
  }
  make_directory(folder.string());
  const std::unique_ptr<ProcessGroup> alone = make_single_group();
  CheckpointWriter writer(folder, Retention(1), tokenizer_files, *alone);
  writer.save(header, parts);
  return *writer.finish();
}

}  // namespace birkhoff
