#include "data/corpus/staged_shards.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/plural.h"

namespace birkhoff {
namespace {

constexpr std::size_t kCopyBytes = std::size_t{4} << 20;
constexpr auto kPoll = std::chrono::seconds(1);  // for copies that another process makes
constexpr auto kPatience = std::chrono::seconds(1);

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

void discard(StagedShard& copy, const std::string& why) {
  if (!copy.is_usable.exchange(false)) return;
  log_warning("the copy is removed, and the corpus is read instead: {}", why);
  remove_tree(copy.path);
}

class StagedShards::Impl {
 public:
  Impl(std::filesystem::path corpus, const configs::CorpusManifest& manifest,
       const StageOptions& options)
      : corpus_(std::move(corpus)),
        folder_(options.folder / manifest.fingerprint()),
        options_(options) {
    const auto add = [&](const auto& arrays) {
      for (const auto& array : arrays) {
        for (const auto& shard : array.shard()) {
          auto& copy = *shards_.emplace_back(std::make_unique<Shard>());
          copy.file = shard.file();
          copy.path = (folder_ / shard.file()).string();
          copy.bytes = shard.bytes();
          copy.hash = shard.hash();
        }
      }
    };
    for (const auto& split : manifest.split()) {
      add(split.stream());
      add(split.record());
    }
    make_directory(folder_.string());
    find_copies();
  }

  // On the thread.
  void run() {
    try {
      while (num_usable() < std::ssize(shards_)) {
        if (options_.makes_copies) {
          if (const std::optional<FileLock> lock = try_lock()) {
            find_copies();
            copy_missing();
            break;
          }
        }
        std::unique_lock lock(mutex_);
        if (ended_.wait_for(lock, kPoll, [this] { return ends_; })) break;
        lock.unlock();
        find_copies();
      }
    } catch (const Error& error) {
      log_warning("staging ends: {}; {} of {} are copied, the rest is read from {}", error.what(),
                  num_usable(), counted(std::ssize(shards_), "shard"), corpus_.string());
    }
    const std::lock_guard lock(mutex_);
    is_done_ = true;
    ended_.notify_all();
  }

  // Asks the thread to end. False: it did not end in time.
  bool end() {
    std::unique_lock lock(mutex_);
    ends_ = true;
    ended_.notify_all();
    return ended_.wait_for(lock, kPatience, [this] { return is_done_; });
  }

  StagedShard* find(const std::string& file) const {
    const auto found =
        std::ranges::find(shards_, file, [](const auto& shard) { return shard->file; });
    return found == shards_.end() ? nullptr : found->get();
  }

  std::int64_t num_usable() const {
    return std::ranges::count_if(shards_,
                                 [](const auto& shard) { return shard->is_usable.load(); });
  }

 private:
  struct Shard : StagedShard {
    std::string file;
    bool was_found = false;  // a copy that was discarded is not found again
  };

  // Null: another process makes copies in this folder.
  std::optional<FileLock> try_lock() const {
    try {
      return std::optional<FileLock>(std::in_place, (folder_ / "lock").string(),
                                     "the staged corpus " + folder_.string());
    } catch (const Error& error) {
      if (error.code() != ExitCode::kUsage) throw;
      return std::nullopt;
    }
  }

  bool ends() {
    const std::lock_guard lock(mutex_);
    return ends_;
  }

  // Finds copies that other processes have made.
  void find_copies() {
    for (const auto& shard : shards_) {
      if (shard->was_found || !path_exists(shard->path) || file_size(shard->path) != shard->bytes) {
        continue;
      }
      shard->was_found = shard->is_usable = true;
    }
  }

  // Copies what is missing, as far as it fits, or until the thread is asked to end.
  void copy_missing() {
    const auto start = std::chrono::steady_clock::now();
    std::int64_t bytes = 0, new_bytes = 0;
    for (const auto& shard : shards_) bytes += shard->was_found ? shard->bytes : 0;
    for (const auto& shard : shards_) {
      if (shard->was_found) continue;
      if (options_.max_bytes > 0 && bytes + new_bytes + shard->bytes > options_.max_bytes) continue;
      if (!copy(*shard)) return;
      if (shard->was_found) new_bytes += shard->bytes;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const std::int64_t usable = num_usable();
    log_info("staged {} of {} in {}: {:.3g} GB copied in {:.0f} s{}", usable,
             counted(std::ssize(shards_), "shard"), folder_.string(),
             static_cast<double>(new_bytes) / 1e9, seconds.count(),
             usable < std::ssize(shards_)
                 ? fmt::format("; the rest is read from {}", corpus_.string())
                 : "");
  }

  // False: asked to end.
  bool copy(Shard& shard) {
    const std::string from = (corpus_ / shard.file).string();
    // The name is this process's own, for file systems without locks.
    const std::string part = fmt::format("{}.{}-{}.part", shard.path, host_name(), getpid());
    remove_leftovers(shard);
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
    if (hasher.hex_digest() != shard.hash) {
      remove_tree(part);
      log_warning(
          "{}: differs from its hash in the manifest, so it is not staged; run birkhoff "
          "verify {}",
          from, corpus_.string());
      return true;
    }
    rename_path(part, shard.path);
    shard.was_found = shard.is_usable = true;
    return true;
  }

  // Unfinished copies of processes that were killed. The lock is held, so nobody writes them.
  void remove_leftovers(const Shard& shard) const {
    for (const std::string& name : list_directory(folder_.string())) {
      if (name.starts_with(shard.file + ".") && name.ends_with(".part")) {
        remove_tree((folder_ / name).string());
      }
    }
  }

  const std::filesystem::path corpus_, folder_;
  const StageOptions options_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool ends_ = false, is_done_ = false;
};

StagedShards::StagedShards(const std::filesystem::path& corpus,
                           const configs::CorpusManifest& manifest, const StageOptions& options)
    : impl_(std::make_shared<Impl>(corpus, manifest, options)),
      thread_([impl = impl_] { impl->run(); }) {}

StagedShards::~StagedShards() {
  if (impl_->end()) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

StagedShard* StagedShards::find(const std::string& file) const { return impl_->find(file); }
std::int64_t StagedShards::num_usable() const { return impl_->num_usable(); }

}  // namespace birkhoff
