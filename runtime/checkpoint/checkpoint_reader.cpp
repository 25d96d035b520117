#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/check.h"
#include "configs/loader/summary.h"
#include "data/corpus/verify.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/verify.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using configs::CheckpointManifest;
using ManifestTensor = CheckpointManifest::Tensor;

bool has_any_aside(const fs::path& folder) {
  if (!path_exists(folder.string())) {
    return false;
  }
  const auto names = list_directory(folder.string(), ExitCode::kCheckpoint);
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name.starts_with(kDamagedPrefix) || name.starts_with(kDivergedPrefix);
  });
}

// Reads a checkpoint as a whole. Sets `diverged` to the reason if training must not resume from it.
CheckpointFolder open_and_verify(const fs::path& path, std::int64_t step,
                                 const CheckpointVerifier& verify, std::string& diverged) {
  CheckpointFolder checkpoint = open_checkpoint(path);
  if (checkpoint.manifest.step() != step) {
    fail(ExitCode::kCheckpoint, "{}: holds step {}; rename the folder to {}", path.string(),
         checkpoint.manifest.step(), step_name(checkpoint.manifest.step()));
  }
  const std::string non_finite = verify(checkpoint);
  if (!non_finite.empty()) {
    diverged = fmt::format("{} is not finite", non_finite);
  } else if (checkpoint.manifest.skipped() > 0) {
    diverged = fmt::format("{} before it", counted(checkpoint.manifest.skipped(), "skipped step"));
  }
  return checkpoint;
}

[[noreturn]] void fail_tensor(const CheckpointFolder& checkpoint, const std::string& name,
                              const std::string& why) {
  fail(ExitCode::kCheckpoint,
       "{}: tensor '{}' {}; check that model and optimizer match the checkpoint",
       checkpoint.path.string(), name, why);
}

void check_fit(const CheckpointFolder& checkpoint, const ManifestTensor& saved,
               const TensorPart& wanted) {
  const TensorRegion region = region_of(saved);
  const std::string dtype = safetensors_dtype(wanted.data.scalar_type());
  if (region.global_shape != wanted.region.global_shape || saved.dtype() != dtype ||
      saved.kind() != kind_name(wanted.kind)) {
    fail_tensor(
        checkpoint, saved.name(),
        fmt::format("is a {} {} [{}] in the checkpoint, but a {} {} [{}] is needed", saved.kind(),
                    saved.dtype(), fmt::join(region.global_shape, ", "), kind_name(wanted.kind),
                    dtype, fmt::join(wanted.region.global_shape, ", ")));
  }
}

// Copies what `saved` and the wanted parts share and adds its length to `copied`. Reads only the
// blocks of the file that hold some of it.
void load_tensor(const SafetensorsReader& reader, const CheckpointManifest& manifest,
                 const ManifestTensor& saved, const std::string& path,
                 std::vector<TensorPart>& parts, const std::vector<std::size_t>& wanted,
                 std::vector<std::int64_t>& copied) {
  struct Copy {
    std::size_t part;  // position in `parts`
    CommonRun run;     // of the block's elements
  };
  const TensorRegion region = region_of(saved);
  const std::int64_t element_bytes = safetensors_element_bytes(saved.dtype()),
                     num_bytes = region.num_elements() * element_bytes,
                     block_bytes = crc_block_bytes(manifest, num_bytes),
                     block_elements = std::max<std::int64_t>(block_bytes / element_bytes, 1);
  std::map<std::int64_t, std::vector<Copy>> copies;  // by block
  for (const std::size_t i : wanted) {
    for_each_common_run(region, parts[i].region, [&](CommonRun run) {
      copied[i] += run.length;
      while (run.length > 0) {
        const std::int64_t block = run.begin_a / block_elements,
                           in_block = run.begin_a - block * block_elements,
                           length = std::min(run.length, block_elements - in_block);
        copies[block].push_back({i, {in_block, run.begin_b, length}});
        run = {run.begin_a + length, run.begin_b + length, run.length - length};
      }
    });
  }
  if (copies.empty()) return;
  const SafetensorsEntry& entry = find_entry(reader, saved, path);
  const auto bytes = std::make_unique_for_overwrite<std::byte[]>(
      static_cast<std::size_t>(std::min(block_bytes, num_bytes)));
  for (const auto& [block, of_block] : copies) {
    const std::int64_t begin = block * block_bytes;
    const auto size = static_cast<std::size_t>(std::min(block_bytes, num_bytes - begin));
    reader.read(bytes.get(), size, entry.begin + begin);
    check_crc(crc32c(bytes.get(), size),
              manifest.version() < 2 ? saved.crc32c() : saved.block_crc32c(static_cast<int>(block)),
              saved, path);
    const at::Tensor source =
        at::from_blob(bytes.get(), {static_cast<std::int64_t>(size) / element_bytes},
                      at::TensorOptions(parts[of_block.front().part].data.scalar_type()));
    for (const auto& [i, run] : of_block) {
      parts[i]
          .data.narrow(0, run.begin_b, run.length)
          .copy_(source.narrow(0, run.begin_a, run.length));
    }
  }
}

void load(const CheckpointFolder& checkpoint, std::vector<TensorPart>& parts, bool allow_surplus) {
  std::map<std::string, std::vector<std::size_t>> wanted;  // positions in `parts`
  for (std::size_t i = 0; i < parts.size(); ++i) {
    require(region_defect(parts[i].region).empty() &&
                parts[i].data.numel() == parts[i].region.num_elements(),
            "a part's data must be as long as its range");
    wanted[parts[i].name].push_back(i);
  }
  std::set<std::string> saved_names;
  for (const auto& tensor : checkpoint.manifest.tensor()) {
    saved_names.insert(tensor.name());
    const auto found = wanted.find(tensor.name());
    if (found == wanted.end()) {
      if (!allow_surplus) {
        fail_tensor(checkpoint, tensor.name(), "is in the checkpoint but not in this run");
      }
      continue;
    }
    for (const std::size_t i : found->second) {
      check_fit(checkpoint, tensor, parts[i]);
    }
  }
  for (const auto& [name, positions] : wanted) {
    if (!saved_names.contains(name)) {
      fail_tensor(checkpoint, name, "is missing");
    }
  }
  std::vector<std::int64_t> copied(parts.size(), 0);
  for (const auto& [file, tensors] : tensors_by_file(checkpoint.manifest)) {
    const std::string path = (checkpoint.path / file).string();
    std::optional<SafetensorsReader> reader;
    for (const ManifestTensor* tensor : tensors) {
      if (const auto found = wanted.find(tensor->name()); found != wanted.end()) {
        if (!reader) {
          reader.emplace(path);
        }
        load_tensor(*reader, checkpoint.manifest, *tensor, path, parts, found->second, copied);
      }
    }
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    require(copied[i] == parts[i].data.numel(), "a checkpoint's parts make up each tensor");
  }
}

}  // namespace

CheckpointFolder open_checkpoint(const fs::path& path) {
  const std::string manifest_path = (path / kCheckpointManifestName).string();
  if (!path_exists(manifest_path)) {
    fail(ExitCode::kCheckpoint, "{}: no {} there, so it is not a finished checkpoint; use another",
         path.string(), kCheckpointManifestName);
  }
  CheckpointFolder checkpoint;
  checkpoint.path = path;
  checkpoint.manifest = parse_checkpoint_manifest(
      read_file(manifest_path, kMaxManifestBytes, ExitCode::kCheckpoint), manifest_path);
  for (const auto& file : checkpoint.manifest.file()) {
    check_size((path / file.name()).string(), file);
  }
  return checkpoint;
}

std::optional<CheckpointFolder> find_newest_checkpoint(const fs::path& folder, bool set_aside,
                                                       const CheckpointVerifier& verify) {
  if (set_aside) {
    restore_replaced(folder);
  }
  const auto candidates = list_checkpoints(folder);
  // Renames a checkpoint to PREFIXstep-N, or PREFIXstep-N-K for the first K >= 2 that is free.
  const auto set_aside_as = [](std::string_view prefix, const auto& candidate) {
    const auto& [step, path] = candidate;
    return rename_to_free(path, fmt::format("{}{}", prefix, step_name(step)));
  };
  std::vector<std::string> diverged;
  const auto warn_of_diverged = [&](const std::string& consequence) {
    if (diverged.empty()) return;
    log_warning("{}: saved while the run diverged: {}; set aside as {}step-*, {}", folder.string(),
                fmt::join(diverged, ", "), kDivergedPrefix, consequence);
  };
  for (auto newest = candidates.rbegin(); newest != candidates.rend(); ++newest) {
    try {
      std::string why;
      CheckpointFolder checkpoint = open_and_verify(newest->second, newest->first, verify, why);
      if (!set_aside || why.empty()) {
        warn_of_diverged(fmt::format("resuming from step {}", newest->first));
        return checkpoint;
      }
      set_aside_as(kDivergedPrefix, *newest);
      diverged.push_back(fmt::format("step {} ({})", newest->first, why));
    } catch (const CheckpointVersionError&) {
      throw;
    } catch (const Error& error) {
      if (error.code() == ExitCode::kStorage) {
        fail(ExitCode::kStorage,
             "{}; if it stays unreadable, move {} away to use the checkpoint before it",
             error.what(), newest->second.string());
      }
      if (error.code() != ExitCode::kCheckpoint) {
        throw;
      }
      std::string consequence = "trying the one before";
      if (set_aside) {
        const fs::path aside = set_aside_as(kDamagedPrefix, *newest);
        consequence = fmt::format("set aside as {}, {}", aside.string(), consequence);
      }
      log_warning("damaged checkpoint: {}; {}", error.what(), consequence);
    }
  }
  warn_of_diverged("none predates the divergence");
  if (!candidates.empty() || has_any_aside(folder)) {
    fail(
        ExitCode::kCheckpoint,
        "{}: no valid checkpoint is left there (damaged ones were renamed to damaged-step-*, those "
        "of a diverged run to diverged-step-*); put a copy back, or start afresh with another "
        "--run or with --fresh",
        folder.string());
  }
  return std::nullopt;
}

void load_checkpoint(const CheckpointFolder& checkpoint, std::vector<TensorPart>& parts) {
  load(checkpoint, parts, /*allow_surplus=*/false);
}

void load_model_tensors(const CheckpointFolder& checkpoint, std::vector<TensorPart>& parts) {
  load(checkpoint, parts, /*allow_surplus=*/true);
}

std::string describe_checkpoint(const CheckpointFolder& checkpoint) {
  const CheckpointManifest& manifest = checkpoint.manifest;
  const configs::Config& config = manifest.config();
  std::string text;
  const auto line = [&text]<typename... Args>(fmt::format_string<Args...> format, Args&&... args) {
    text += fmt::format(format, std::forward<Args>(args)...) + "\n";
  };
  line("checkpoint   {}", checkpoint.path.string());
  line("format       {} {}, written by {} on {}", manifest.format(), manifest.version(),
       manifest.program().empty() ? "an unknown program" : manifest.program(),
       counted(manifest.ranks(), "rank"));
  line("run          {}", manifest.run());
  line("step         {} ({}, {})", manifest.step(), counted(manifest.consumed(), "sequence"),
       counted(manifest.tokens(), "token"));
  line("corpus       {} ({})", manifest.corpus(),
       manifest.tokenizer().empty()
           ? "no tokenizer"
           : fmt::format("{}, {}", manifest.tokenizer(), counted(manifest.vocabulary(), "id")));
  if (manifest.has_source_tokenizer()) {
    line("sources      {}, {}", manifest.source_tokenizer().kind(),
         counted(manifest.source_tokenizer().vocabulary(), "id"));
  }
  if (manifest.class_name_size() > 0) line("labels       {}", classes_text(manifest.class_name()));
  line(
      "model        {}, sequences of {}{}", layers_text(config.model()),
      counted(config.data().sequence_length(), "token"),
      config.model().has_encoder() ? fmt::format(" and targets of {}", target_length(config)) : "");
  line("mechanism    {}", attention_text(config.model()));
  line("optimizer    {}", optimization_text(config.train()));
  // Names come last, so that long ones shift no other column.
  line("\n{:>16}  {:<32}  {}", "bytes", "xxh3-128", "file");
  for (const auto& file : manifest.file()) {
    line("{:>16}  {:<32}  {}", file.bytes(), file.hash(), file.name());
  }
  line("\n{:<5} {:>14}  {:<20}  {}", "dtype", "elements", "shape", "parameter");
  std::int64_t parameters = 0, other_elements = 0;
  for (const auto& tensor : manifest.tensor()) {
    const TensorRegion region = region_of(tensor);
    if (tensor.kind() != "parameter") {
      other_elements += region.num_elements();
      continue;
    }
    parameters += region.num_elements();
    line("{:<5} {:>14}  {:<20}  {}", tensor.dtype(), region.num_elements(),
         fmt::format("[{}]", fmt::join(region.global_shape, ", ")), tensor.key());
  }
  line("\n{}; {} of other state", counted(parameters, "parameter"),
       counted(other_elements, "element"));
  return text;
}

}  // namespace birkhoff
