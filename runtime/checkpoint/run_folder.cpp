#include "runtime/checkpoint/run_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/logging/log.h"
#include "runtime/checkpoint/commit.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

constexpr char kRunFormat[] = "birkhoff run";
constexpr int kRunVersion = 1;
constexpr char kBeforeFresh[] = "before-fresh-";
constexpr std::int64_t kMaxIdentityBytes = 65536;
constexpr std::int64_t kMetricsPieceBytes = 1 << 20;  // of metrics.jsonl, which may be of any size

// Differs between any two runs, on whatever machines they start.
std::string make_run_id(std::uint64_t seed) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::string text = fmt::format("{} {} {} {}", seed, std::chrono::nanoseconds(now).count(),
                                       host_name(), ::getpid());
  return xxh3_hex(text.data(), text.size());
}

// Whether a file belongs to the folder and not to the run in it.
bool stays(const std::string& name) {
  return name == "lock" || name.starts_with(kHolderPrefix) || name.starts_with(kBeforeFresh);
}

// A folder may become a run if it is empty, or holds only what a crash leaves: at the very start of
// a run, or between moving an earlier run aside and writing the new one's identity.
bool can_become_run(const std::vector<std::string>& names) {
  return std::all_of(names.begin(), names.end(), [](const std::string& name) {
    return stays(name) || name.starts_with("run.json");
  });
}

// Temporary files of write_file_durably() that killed processes left in `root`.
void remove_temporary_files(const fs::path& root) {
  for (const std::string& name : list_directory(root.string())) {
    for (const char* file :
         {"run.json", "config.txtpb", "metrics.jsonl", "loss.svg", "status.json"}) {
      if (name.starts_with(std::string(file) + ".tmp-")) remove_file((root / name).string());
    }
  }
}

// Moves everything except locks and earlier before-fresh folders into before-fresh-K, for the
// first free K.
void move_aside(const fs::path& root) {
  fs::path target;
  for (int k = 1; target.empty() || path_exists(target.string()); ++k) {
    target = root / fmt::format("{}{}", kBeforeFresh, k);
  }
  std::vector<std::string> names = list_directory(root.string());
  make_directory(target.string());
  // The identity moves last: until then a crash leaves a run, never an unknown folder.
  std::stable_partition(names.begin(), names.end(),
                        [](const std::string& name) { return name != "run.json"; });
  for (const std::string& name : names) {
    if (!stays(name)) {
      rename_path((root / name).string(), (target / name).string());
    }
  }
}

}  // namespace

fs::path RunPaths::log(int rank) const { return log_folder() / fmt::format("rank-{}.log", rank); }

void RunFolder::check_usable(const fs::path& folder) {
  if (!path_exists(folder.string())) return;
  if (!is_directory(folder.string())) {
    fail(ExitCode::kUsage, "{}: not a folder; choose another --run", folder.string());
  }
  const bool is_run = path_exists(RunPaths{folder}.identity().string());
  if (!is_run && !can_become_run(list_directory(folder.string()))) {
    fail(ExitCode::kUsage,
         "{}: not empty, and not the folder of a run (no run.json there); choose an empty or new "
         "folder for --run",
         folder.string());
  }
}

std::optional<std::string> run_holder(const RunPaths& paths) {
  const auto holder = lock_holder(paths.lock().string());
  return holder ? holder : Lease::holder(paths.root);
}

RunFolder::RunFolder(const fs::path& folder, std::uint64_t seed, bool fresh) : paths_{folder} {
  check_usable(folder);
  make_directory(folder.string());
  const std::string what = fmt::format("the run folder {}", folder.string());
  try {
    lock_.emplace(paths_.lock().string(), what);
    if (!lock_->is_held()) {
      log_warning(
          "{}: its file system has no locks (flock), so only the lease guards it: mount it with "
          "locks (Lustre: flock; NFS: lockd)",
          what);
    }
  } catch (const Error& error) {
    if (error.code() != ExitCode::kUsage || !Lease::outlived_by_lock(folder)) throw;
  }
  lease_.emplace(folder, what, LeaseTimes{}, [&](const std::string& holder) {
    log_info("{}: held by {}, which may be gone: waiting for its lease to end", what, holder);
  });
  remove_leftovers(paths_.checkpoints());
  remove_temporary_files(folder);
  if (path_exists(paths_.identity().string())) {
    read_identity();
    if (!fresh) {
      return;
    }
    move_aside(folder);
  }
  id_ = make_run_id(seed);
  has_checkpoint_ = false;
  write_identity();
}

void RunFolder::read_identity() {
  const std::string path = paths_.identity().string();
  const nlohmann::json json =
      nlohmann::json::parse(read_file(path, kMaxIdentityBytes, ExitCode::kCheckpoint), nullptr,
                            /*allow_exceptions=*/false);
  const auto field = [&json](const char* name) {
    return json.is_object() && json.contains(name) ? json[name] : nlohmann::json();
  };
  if (field("format") != kRunFormat || field("version") != kRunVersion ||
      !field("id").is_string() || !field("has_checkpoint").is_boolean()) {
    fail(ExitCode::kCheckpoint,
         "{}: damaged, or of another version; it must hold format '{}', version {}, id and "
         "has_checkpoint: restore it, or choose another --run",
         path, kRunFormat, kRunVersion);
  }
  id_ = field("id").get<std::string>();
  has_checkpoint_ = field("has_checkpoint").get<bool>();
}

void RunFolder::write_identity() const {
  const nlohmann::ordered_json json = {{"format", kRunFormat},
                                       {"version", kRunVersion},
                                       {"id", id_},
                                       {"has_checkpoint", has_checkpoint_}};
  write_file_durably(paths_.identity().string(), json.dump() + "\n");
}

std::optional<CheckpointFolder> RunFolder::find_resume_point(const CheckpointVerifier& verify) {
  auto newest = find_newest_checkpoint(paths_.checkpoints(), /*set_aside=*/true, verify);
  if (!newest && has_checkpoint_) {
    fail(ExitCode::kCheckpoint,
         "{}: this run had checkpoints and none is left; put a copy back, or start afresh with "
         "another --run or with --fresh",
         paths_.checkpoints().string());
  }
  if (newest && newest->manifest.run() != id_) {
    fail(ExitCode::kCheckpoint,
         "{}: belongs to run {}, this folder is run {}; move it to its own run's folder, or start "
         "afresh with another --run",
         newest->path.string(), newest->manifest.run(), id_);
  }
  if (newest) note_checkpoint();  // the run may have been killed before it noted this
  return newest;
}

void RunFolder::note_checkpoint() {
  if (!has_checkpoint_) {
    has_checkpoint_ = true;
    write_identity();
  }
}

void RunFolder::cut_metrics(std::int64_t bytes) const {
  const std::string path = paths_.metrics().string();
  if (!path_exists(path)) {
    return;
  }
  const File old = File::open_for_read(path);
  // The file may be shorter than when the checkpoint was saved: metrics are not synced, and the
  // machine may have lost power.
  std::int64_t size = std::min(bytes, old.size());
  std::string piece;
  const auto read = [&](std::int64_t begin, std::int64_t end) -> const std::string& {
    piece.resize(static_cast<std::size_t>(end - begin));
    old.pread_exact(piece.data(), piece.size(), begin);
    return piece;
  };
  while (size > 0) {  // back to the end of a line
    const std::int64_t begin = std::max<std::int64_t>(0, size - kMetricsPieceBytes);
    const std::size_t line_end = read(begin, size).rfind('\n');
    if (line_end != std::string::npos) {
      size = begin + static_cast<std::int64_t>(line_end) + 1;
      break;
    }
    size = begin;
  }
  write_file_durably(path, [&](File& file) {
    for (std::int64_t at = 0; at < size; at += kMetricsPieceBytes)
      file.write_all(read(at, std::min(at + kMetricsPieceBytes, size)));
  });
}

}  // namespace birkhoff
