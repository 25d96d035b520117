#include "data/corpus/staged_shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/plural.h"

namespace birkhoff {
namespace {

constexpr std::size_t kCopyBytes = std::size_t{4} << 20;
constexpr auto kPoll = std::chrono::seconds(1);  // for copies that another process makes

template <typename Visit>
void for_each_shard(const configs::CorpusManifest& manifest, const Visit& visit) {
  for (const auto& split : manifest.split()) {
    for (const auto& stream : split.stream()) std::ranges::for_each(stream.shard(), visit);
    for (const auto& record : split.record()) std::ranges::for_each(record.shard(), visit);
  }
}

double gigabytes(std::int64_t bytes) { return static_cast<double>(bytes) / 1e9; }

}  // namespace

std::filesystem::path staging_folder(const std::string& text) {
  if (!text.starts_with('$')) return text;
  const std::size_t end = std::min(text.find('/'), text.size());
  const std::string name = text.substr(1, end - 1);
  const char* const value = std::getenv(name.c_str());
  if (value == nullptr || *value == 0) {
    fail(
        ExitCode::kUsage,
        "data.stage.folder: {}: the environment variable {} is not set on {}; set it, or write the "
        "path of a folder on the node's disk",
        text, name, host_name());
  }
  return value + text.substr(end);
}

StagedShards::StagedShards(const std::filesystem::path& corpus,
                           const configs::CorpusManifest& manifest,
                           const std::filesystem::path& folder, std::int64_t max_bytes)
    : corpus_(corpus),
      folder_(folder / manifest.fingerprint()),
      manifest_(manifest),
      max_bytes_(max_bytes) {
  for_each_shard(manifest_,
                 [&](const auto& entry) { shards_.push_back(std::make_unique<Shard>(entry)); });
  make_directory(folder_.string());
  find_copies();
  thread_ = std::thread([this] { run(); });
}

StagedShards::~StagedShards() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  ended_.notify_one();
  thread_.join();
}

bool StagedShards::ends() const {
  const std::lock_guard lock(mutex_);
  return ends_;
}

std::string StagedShards::copy_of(const std::string& file) const {
  const auto found = std::ranges::find(
      shards_, file, [](const auto& shard) -> const std::string& { return shard->entry->file(); });
  return found != shards_.end() && (*found)->is_copied ? (folder_ / file).string() : "";
}

std::int64_t StagedShards::find_copies() {
  std::int64_t bytes = 0;
  for (const auto& shard : shards_) {
    const std::string path = (folder_ / shard->entry->file()).string();
    if (!path_exists(path) || file_size(path) != shard->entry->bytes()) continue;
    bytes += shard->entry->bytes();
    if (!shard->is_copied.exchange(true)) ++num_copies_;
  }
  return bytes;
}

void StagedShards::run() {
  try {
    while (num_copies_ < static_cast<std::int64_t>(shards_.size())) {
      std::optional<FileLock> lock;
      try {
        lock.emplace((folder_ / "lock").string(), "the staged corpus " + folder_.string());
      } catch (const Error& error) {
        if (error.code() != ExitCode::kUsage) throw;
      }
      if (lock) return copy_missing(find_copies());
      std::unique_lock waiting(mutex_);
      if (ended_.wait_for(waiting, kPoll, [this] { return ends_; })) return;
      waiting.unlock();
      find_copies();
    }
  } catch (const Error& error) {
    log_warning("staging ends: {}; {} of {} are copied, the others are read from {}", error.what(),
                num_copies_.load(), counted(static_cast<std::int64_t>(shards_.size()), "shard"),
                corpus_.string());
  }
}

void StagedShards::copy_missing(std::int64_t copied_bytes) {
  const auto start = std::chrono::steady_clock::now();
  std::int64_t new_bytes = 0;
  for (const auto& shard : shards_) {
    if (shard->is_copied) continue;
    const std::int64_t bytes = shard->entry->bytes();
    if (max_bytes_ > 0 && copied_bytes + bytes > max_bytes_) continue;
    if (!copy(*shard)) return;
    if (!shard->is_copied) continue;
    copied_bytes += bytes;
    new_bytes += bytes;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  log_info("staged {} of {} in {}: {:.3g} GB copied in {:.0f} s{}", num_copies_.load(),
           counted(static_cast<std::int64_t>(shards_.size()), "shard"), folder_.string(),
           gigabytes(new_bytes), seconds.count(),
           num_copies_ < static_cast<std::int64_t>(shards_.size())
               ? fmt::format("; the others are read from {}", corpus_.string())
               : "");
}

bool StagedShards::copy(Shard& shard) {
  const std::string from = (corpus_ / shard.entry->file()).string(),
                    to = (folder_ / shard.entry->file()).string(), part = to + ".part";
  remove_tree(part);  // of a process that was killed
  const File source = File::open_for_read(from, ExitCode::kData);
  Xxh3Hasher hasher;
  try {
    File copy = File::create(part);
    std::vector<char> bytes(kCopyBytes);
    const std::int64_t size = source.size();
    for (std::int64_t at = 0; at < size;) {
      if (ends()) return false;
      const auto count =
          static_cast<std::size_t>(std::min<std::int64_t>(size - at, std::ssize(bytes)));
      source.pread_exact(bytes.data(), count, at);
      hasher.update(bytes.data(), count);
      copy.write_all(bytes.data(), count);
      at += static_cast<std::int64_t>(count);
    }
    copy.sync();
    copy.close();
  } catch (const Error&) {
    remove_tree(part);  // makes room on a full disk
    throw;
  }
  if (hasher.hex_digest() != shard.entry->hash()) {
    remove_tree(part);
    log_warning(
        "{}: differs from its hash in the manifest, so it is not staged; run birkhoff verify",
        from);
    return true;
  }
  rename_path(part, to);
  shard.is_copied = true;
  ++num_copies_;
  return true;
}

}  // namespace birkhoff
