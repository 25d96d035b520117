#include "runtime/checkpoint/commit.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/number_text.h"
#include "configs/loader/check.h"
#include "runtime/checkpoint/layout.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/safetensors.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using configs::CheckpointManifest;

constexpr std::string_view kOldPrefix = ".tmp-old-";  // begins with kAsidePrefix

// N of prefix + N, where N is all digits.
std::optional<std::int64_t> parse_step(std::string_view name, std::string_view prefix) {
  if (!name.starts_with(prefix)) {
    return std::nullopt;
  }
  const auto step = parse_number<std::int64_t>(name.substr(prefix.size()));
  return step && *step >= 0 ? step : std::nullopt;
}

CheckpointManifest::File describe_file(const fs::path& path) {
  const File file = File::open_for_read(path.string());
  CheckpointManifest::File description;
  description.set_name(path.filename().string());
  description.set_bytes(file.size());
  description.set_hash(xxh3_hex(file));
  return description;
}

// Removes files that no run needs any more. A failure is a warning: on a network file system a
// folder stays as long as another process reads a file in it.
void tidy(const std::function<void()>& remove) {
  try {
    remove();
  } catch (const Error& error) {
    log_warning("what no run needs any more is not removed: {}; the next save or start tries again",
                error.what());
  }
}

void tidy_tree(const fs::path& path) {
  tidy([&] { remove_tree(path.string()); });
}

// Renames before deleting: a half-deleted folder must never look like a checkpoint.
void tidy_checkpoint(const fs::path& folder) {
  tidy([&] {
    const std::string name = fmt::format("{}{}", kOldPrefix, folder.filename().string());
    remove_tree(rename_to_free(folder, name).string());
  });
}

// The steps whose checkpoints have the lowest loss of an evaluation, as far as manifests can be
// read: losses of other evaluated_data() are not comparable. Depends only on the files on disk,
// so a crash loses nothing.
std::set<std::int64_t> best_steps(const std::map<std::int64_t, fs::path>& folders) {
  struct Best {
    std::int64_t step;
    double loss;
  };
  std::map<std::string, Best> best_of;  // by evaluated_data()
  for (const auto& [step, path] : folders) {
    CheckpointManifest manifest;
    try {
      manifest = open_checkpoint(path).manifest;
    } catch (const Error& error) {
      if (error.code() != ExitCode::kCheckpoint) throw;
      continue;  // damaged: a run that resumes from it reports it
    }
    if (!manifest.has_held_out_loss()) continue;
    const Best candidate{step, manifest.held_out_loss()};
    Best& best = best_of.emplace(evaluated_data(manifest.config()), candidate).first->second;
    if (candidate.loss < best.loss) best = candidate;
  }
  std::set<std::int64_t> steps;
  for (const auto& [evaluation, best] : best_of) steps.insert(best.step);
  return steps;
}

void remove_oldest(const fs::path& checkpoints, std::int64_t committed_step, Retention retention) {
  const auto folders = list_checkpoints(checkpoints);
  const std::set<std::int64_t> best =
      retention.best ? best_steps(folders) : std::set<std::int64_t>();
  auto oldest = folders.begin();
  for (auto excess = static_cast<int>(folders.size()) - retention.newest; excess > 0;
       --excess, ++oldest) {
    if (oldest->first != committed_step && !best.contains(oldest->first)) {
      tidy_checkpoint(oldest->second);
    }
  }
}

// Removes what begins with the prefix, and each .replaced-step-N, whose step-N exists by then.
void tidy_leftovers(const fs::path& checkpoints, std::string_view prefix) {
  for (const std::string& name : list_directory(checkpoints.string())) {
    if (name.starts_with(prefix)) tidy_tree(checkpoints / name);
    if (name.starts_with(kReplacedPrefix)) tidy_checkpoint(checkpoints / name);
  }
}

}  // namespace

fs::path rename_to_free(const fs::path& path, const std::string& name) {
  fs::path free = path.parent_path() / name;
  for (int k = 2; path_exists(free.string()); ++k) {
    free = path.parent_path() / fmt::format("{}-{}", name, k);
  }
  rename_path(path.string(), free.string());
  return free;
}

std::string step_name(std::int64_t step) { return fmt::format("{}{:08d}", kStepPrefix, step); }

std::map<std::int64_t, fs::path> list_checkpoints(const fs::path& checkpoints) {
  std::map<std::int64_t, fs::path> folders;
  if (!path_exists(checkpoints.string())) {
    return folders;
  }
  const std::vector<std::string> names =
      list_directory(checkpoints.string(), ExitCode::kCheckpoint);
  for (const std::string_view prefix : {kStepPrefix, kReplacedPrefix}) {
    for (const std::string& name : names) {
      if (const auto step = parse_step(name, prefix)) {
        folders.emplace(*step, checkpoints / name);  // keeps step-N if both exist
      }
    }
  }
  return folders;
}

CheckpointManifest::File write_tensor_file(const fs::path& folder, const std::string& name,
                                           std::vector<StagedTensor>& tensors,
                                           const std::atomic<bool>& abandon) {
  const std::string path = (folder / name).string();
  std::vector<SafetensorsEntry> entries;
  for (const StagedTensor& tensor : tensors) entries.push_back(safetensors_entry(tensor.entry));
  SafetensorsWriter writer(path, entries, kPartMetadata);
  for (StagedTensor& tensor : tensors) {
    std::uint32_t crc = 0;
    for (std::int64_t at = 0; at < tensor.num_bytes; at += kCrcBlockBytes) {
      if (abandon) {
        fail(ExitCode::kStorage, "'{}': the save was abandoned", path);
      }
      const auto length = static_cast<std::size_t>(std::min(kCrcBlockBytes, tensor.num_bytes - at));
      writer.write(tensor.data + at, length);
      crc = crc32c(tensor.data + at, length, crc);
      tensor.entry.add_block_crc32c(crc32c(tensor.data + at, length));
    }
    tensor.entry.set_file(name);
    tensor.entry.set_crc32c(crc);
  }
  writer.finish();
  const CheckpointManifest::File read_back = describe_file(path);
  if (read_back.bytes() != writer.num_bytes() || read_back.hash() != writer.hash()) {
    fail(ExitCode::kStorage, "'{}' reads back {} bytes that differ from the {} written", path,
         read_back.bytes(), writer.num_bytes());
  }
  return read_back;
}

fs::path commit_checkpoint(const fs::path& checkpoints, const fs::path& aside,
                           CheckpointManifest manifest,
                           const std::map<std::string, std::string>& extra_files,
                           Retention retention, const std::function<void()>& require_folder) {
  // A state that could not be loaded is a defect of the caller, and it is never committed.
  if (const std::string defect = manifest_defect(manifest); !defect.empty()) {
    fail(ExitCode::kInternal, "internal error: the ranks' parts do not make up the state: {}",
         defect);
  }
  for (const auto& [name, content] : extra_files) {
    write_file_durably((aside / name).string(), content);
    *manifest.add_file() = describe_file(aside / name);
  }
  write_file_durably((aside / kModelIndexName).string(), index_text(manifest));
  *manifest.add_file() = describe_file(aside / kModelIndexName);
  write_file_durably((aside / kCheckpointManifestName).string(), manifest_text(manifest));
  // Do not commit files that cannot be read back, or are not visible from this rank.
  open_checkpoint(aside);
  sync_directory(aside.string());

  if (require_folder) require_folder();
  const fs::path folder = checkpoints / step_name(manifest.step());
  const fs::path replaced = checkpoints / fmt::format("{}{:08d}", kReplacedPrefix, manifest.step());
  if (path_exists(folder.string())) {
    rename_path(folder.string(), replaced.string());
  }
  rename_path(aside.string(), folder.string());
  tidy([&] {
    if (path_exists(replaced.string())) tidy_checkpoint(replaced);
  });
  // So far only this save's own files were removed. Another job may have taken the run since.
  if (require_folder) require_folder();
  tidy([&] {
    tidy_leftovers(checkpoints, kOldPrefix);  // those that could not be removed before
    remove_oldest(checkpoints, manifest.step(), retention);
  });
  return folder;
}

void restore_replaced(const fs::path& checkpoints) {
  for (const auto& [step, path] : list_checkpoints(checkpoints)) {
    if (path.filename().string().starts_with(kReplacedPrefix)) {
      rename_path(path.string(), (checkpoints / step_name(step)).string());
    }
  }
}

void remove_leftovers(const fs::path& checkpoints) {
  if (!path_exists(checkpoints.string())) {
    return;
  }
  restore_replaced(checkpoints);
  tidy_leftovers(checkpoints, kAsidePrefix);
}

}  // namespace birkhoff
