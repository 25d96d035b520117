#include "launcher/runs/run_paths.h"

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/gpu/device.h"
#include "configs/loader/check.h"
#include "configs/loader/config_io.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/finite_state.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/run_checkpoints.h"

namespace birkhoff {
namespace {

// The first bytes of a manifest, enough to see its format line; empty if there is none.
std::string start_of(const std::filesystem::path& file) {
  if (!path_exists(file.string())) return "";
  std::string text(256, '\0');
  text.resize(
      File::open_for_read(file.string(), ExitCode::kData).read_some(text.data(), text.size()));
  return text;
}

// A folder with shards is a corpus even if its manifest does not say so.
bool holds_shards(const std::filesystem::path& folder) {
  const std::filesystem::directory_iterator files(folder);
  return std::any_of(begin(files), end(files),
                     [](const auto& entry) { return entry.path().extension() == ".h5"; });
}

}  // namespace

PathKind kind_of(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error))
    fail(ExitCode::kUsage, "{}: no such folder", path.string());
  const std::string start = start_of(path / "manifest.json");
  if (start.find("birkhoff corpus") != std::string::npos) return PathKind::kCorpus;
  if (!start.empty()) {
    const bool is_checkpoint = start.find("birkhoff checkpoint") != std::string::npos;
    return !is_checkpoint && holds_shards(path) ? PathKind::kCorpus : PathKind::kCheckpoint;
  }
  const RunPaths run{path};
  for (const auto& part : {run.identity(), run.checkpoints()}) {
    if (std::filesystem::exists(part, error)) return PathKind::kRun;
  }
  fail(ExitCode::kUsage,
       "{}: neither a corpus (manifest.json), nor a run folder (run.json, checkpoints/), nor a "
       "checkpoint (manifest.json)",
       path.string());
}

CheckpointFolder checkpoint_of(const std::filesystem::path& path) {
  switch (kind_of(path)) {
    case PathKind::kCheckpoint: {
      CheckpointFolder checkpoint = open_checkpoint(path);
      verify_checkpoint(checkpoint);
      return checkpoint;
    }
    case PathKind::kRun: {
      auto newest = find_newest_checkpoint(path / "checkpoints", /*set_aside=*/false);
      if (!newest)
        fail(ExitCode::kCheckpoint, "{}: holds no checkpoint yet; train first", path.string());
      return *newest;
    }
    case PathKind::kCorpus:
      break;
  }
  fail(ExitCode::kUsage, "{}: is a corpus; name a run folder or a checkpoint", path.string());
}

CheckpointFolder agreed_checkpoint(const std::string& path, ProcessGroup& world) {
  CheckpointFolder checkpoint;
  if (world.rank() == 0) checkpoint = checkpoint_of(path);
  const std::string chosen =
      world.broadcast_bytes(checkpoint.path.string(), 0, "chosen checkpoint");
  return world.rank() == 0 ? checkpoint : open_checkpoint(chosen);
}

std::vector<std::filesystem::path> checkpoints_of(const std::filesystem::path& path) {
  if (kind_of(path) == PathKind::kCheckpoint) return {path};
  std::vector<std::filesystem::path> folders;
  for (const auto& [step, folder] : list_checkpoints(RunPaths{path}.checkpoints())) {
    folders.push_back(folder);
  }
  if (folders.empty())
    fail(ExitCode::kCheckpoint, "{}: holds no checkpoint yet; train first", path.string());
  return folders;
}

at::Device device_named(const std::string& name, int local_rank) {
  return name == "cuda" ? cuda_device(local_rank) : at::Device(at::kCPU);
}

configs::Config config_of(const CheckpointFolder& checkpoint,
                          const std::vector<std::string>& settings) {
  // Parsed from text, because a forged manifest can have a matching checksum.
  const std::string text = config_text(checkpoint.manifest.config());
  const std::string name = (checkpoint.path / "manifest.json").string() + ", config";
  const configs::Config trained = parse_config(text, name, {});
  if (settings.empty()) return trained;
  configs::Config config = parse_config(text, name, settings);
  const std::vector<UselessValue> useless = useless_values(config);
  for (const ConfigDifference& difference : diff_configs(trained, config)) {
    for (const UselessValue& value : useless) {
      if (value.path == difference.path) {
        fail(ExitCode::kConfig, "--set {}: {}", value.path, value.what);
      }
    }
    if (difference.evaluation) continue;
    fail(ExitCode::kConfig,
         "--set {}={}: an evaluation cannot change this field, which is {} in the trained model; "
         "fields that it can change are marked eval in `birkhoff config reference`",
         difference.path, difference.after, difference.before);
  }
  return config;
}

void check_divides(int tensor_ranks, configs::Config config) {
  if (tensor_ranks == 1) return;
  config.mutable_mesh()->set_tensor(tensor_ranks);
  // Training might refuse ranks for its optimizer or its CUDA graphs, which do not matter here.
  config.mutable_train()->set_cuda_graph(false);
  config.mutable_train()->mutable_optimizer()->mutable_adamw();
  resolve(config);
  check_consistency(config, SourceLocations(fmt::format("--tensor {}", tensor_ranks)));
}

std::unique_ptr<Model> load_model(const CheckpointFolder& checkpoint, const Task& task,
                                  const ModelPlacement& place, ParameterValues values) {
  check_divides(place.tensor_size, config_of(checkpoint));
  std::unique_ptr<Model> model = task.make_model(model_inputs(checkpoint.manifest), place);
  std::vector<TensorPart> shards = model_tensors(*model);
  load_model_tensors(checkpoint, shards);
  if (values == ParameterValues::kAny) return model;
  if (const std::string name = find_non_finite(shards); !name.empty()) {
    fail(ExitCode::kNumerical,
         "{}: tensor '{}' holds values that are not finite: the run had diverged; use an earlier "
         "checkpoint",
         checkpoint.path.string(), name);
  }
  return model;
}

std::unique_ptr<Model> load_model(const CheckpointFolder& checkpoint, const ModelPlacement& place,
                                  ParameterValues values) {
  return load_model(checkpoint, *make_task(config_of(checkpoint)), place, values);
}

std::unique_ptr<Tokenizer> tokenizer_of(const CheckpointFolder& checkpoint) {
  const configs::CheckpointManifest& manifest = checkpoint.manifest;
  if (manifest.tokenizer().empty()) {
    fail(ExitCode::kUsage,
         "{}: the model has no tokenizer, because it was trained on records and not on text; name "
         "a model of text",
         checkpoint.path.string());
  }
  std::filesystem::path file;
  if (!manifest.tokenizer_file().empty()) file = checkpoint.path / manifest.tokenizer_file();
  return load_tokenizer(manifest.tokenizer(), file, manifest.vocabulary());
}

std::unique_ptr<Tokenizer> source_tokenizer_of(const CheckpointFolder& checkpoint) {
  if (!checkpoint.manifest.has_source_tokenizer()) return tokenizer_of(checkpoint);
  const auto& tokenizer = checkpoint.manifest.source_tokenizer();
  const std::filesystem::path file =
      tokenizer.file().empty() ? std::filesystem::path() : checkpoint.path / tokenizer.file();
  return load_tokenizer(tokenizer.kind(), file, tokenizer.vocabulary());
}

}  // namespace birkhoff
