// Checked file I/O: the only door to the file system for what we write, and for inputs whose errors
// users must see. Every failed call throws Error naming the call, the path, the system's reason and
// what to do. Interrupted calls are repeated, short transfers continued; a failed fsync is final,
// because the kernel may have dropped the pages. Local to the calling rank. A File belongs to one
// thread at a time; pread_exact may be called from several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/unique_handle.h"

struct stat;

namespace birkhoff {

struct FileDescriptorTraits {
  using Handle = int;
  static Handle null() { return -1; }
  static void close(Handle fd) noexcept;
};

class File {
 public:
  // A regular file. What is wrong with the input itself (missing, truncated, a folder, a pipe or
  // device, which might never end) carries `code`; what the system cannot do now (permissions,
  // limits, EIO) carries kStorage.
  static File open_for_read(const std::string& path, ExitCode code = ExitCode::kStorage);
  // The same, or a pipe: a FIFO, or what a shell makes of <(command). Who writes into it must be
  // there within kPipeSeconds.
  static File open_stream_for_read(const std::string& path, ExitCode code = ExitCode::kStorage);
  // A new file; an existing one is an error.
  static File create(const std::string& path);
  // Writes go to the end; created if missing. Not a FIFO.
  static File open_for_append(const std::string& path);
  // What is left of it. Error(kUsage) if it is closed.
  static File standard_input();

  static constexpr int kPipeSeconds = 5;

  void write_all(const void* data, std::size_t num_bytes);
  void write_all(std::string_view bytes) { write_all(bytes.data(), bytes.size()); }
  // The next bytes, at most num_bytes; 0 at the end of the file.
  std::size_t read_some(void* out, std::size_t num_bytes);
  // Exactly num_bytes at `offset`; a file that ends before is an error.
  void pread_exact(void* out, std::size_t num_bytes, std::int64_t offset) const;
  std::int64_t size() const;
  // Returns once read_some() has something to return. A pipe that gives nothing for kPipeSeconds is
  // an error.
  void wait_for_input() const;
  // Returns when everything written is on the device.
  void sync();
  // Must be called on a written file before it goes out of scope: only this close is checked.
  void close();

  const std::string& path() const { return path_; }
  // Opens the same file again in this process while this object lives, also once it has no name.
  std::string descriptor_path() const;

 private:
  File(std::string path, int flags, ExitCode code);
  File(std::string path, UniqueHandle<FileDescriptorTraits> fd, ExitCode code);
  static File open_kinds(const std::string& path, ExitCode code, bool pipes);
  struct stat status() const;
  void wait_for_writer() const;
  UniqueHandle<FileDescriptorTraits> fd_;
  std::string path_;
  ExitCode code_ = ExitCode::kStorage;
};

// The file holds either its old content or all of `bytes`, whatever happens: temporary file beside
// it, fsync, rename, fsync of the folder. A temporary file left by a crash is overwritten by the
// next call of the same process id.
void write_file_durably(const std::string& path, std::string_view bytes);
// The whole file; more than max_bytes is an error.
std::string read_file(const std::string& path, std::int64_t max_bytes,
                      ExitCode code = ExitCode::kStorage);
// The same of a file or a pipe, which must not pause for kPipeSeconds.
std::string read_stream(const std::string& path, std::int64_t max_bytes,
                        ExitCode code = ExitCode::kStorage);
// The same of File::standard_input(), which may take its time.
std::string read_standard_input(std::int64_t max_bytes);

// What stat (or lstat) says of a path; false, errno telling why, if it names nothing. Any other
// error throws, a path that cannot name a file with `code`.
bool find_status(const std::string& path, bool follow_links, struct stat* status,
                 ExitCode code = ExitCode::kStorage);
// True if the path names anything / a directory. Any error but "does not exist" throws.
bool path_exists(const std::string& path);
bool is_directory(const std::string& path);
// A FIFO, or what a shell makes of <(command).
bool is_pipe(const std::string& path);
std::int64_t file_size(const std::string& path, ExitCode code = ExitCode::kStorage);
// With missing parents; an existing directory is fine. Durable, also if a process made it that was
// killed meanwhile.
void make_directory(const std::string& path);
// Names (not paths) in a directory, sorted, without . and ..
std::vector<std::string> list_directory(const std::string& path,
                                        ExitCode code = ExitCode::kStorage);
// Atomic on one file system, and durable: syncs the folders of both names. Replaces a file, never a
// full directory.
void rename_path(const std::string& from, const std::string& to);
void remove_file(const std::string& path);
// A directory with all it holds, or a file; nothing if it does not exist. Does not follow symbolic
// links.
void remove_tree(const std::string& path);
// Makes the names in a directory durable.
void sync_directory(const std::string& path);
// Bytes that this user may still write to the file system of a path. What a quota leaves is not
// seen. A file system that does not say how large it is: the largest number.
std::int64_t free_bytes(const std::string& path);
// The folder part of a path: "a/b" -> "a", "b" -> ".", "/b" -> "/".
std::string parent_path(const std::string& path);

// An exclusive lock (flock) held until destruction, by the file `path`, which stays and names its
// last holder. Error(kUsage) naming host and process of the holder if another process has it.
class FileLock {
 public:
  // what: "the run folder /x", for the message.
  FileLock(const std::string& path, const std::string& what);

 private:
  UniqueHandle<FileDescriptorTraits> fd_;
};

// The holder of a FileLock, as the lock's file names it; nullopt if the lock is free or there is no
// file. Takes a shared lock for a moment, which works on network file systems too; FileLock waits
// that long, so a look never keeps a process from its lock.
std::optional<std::string> lock_holder(const std::string& path);

// For tests: called before each system call of this file with the call's name ("open", "write",
// "pread", "fsync", "rename", ...), its path and its number since the hook was set. Returns 0 to
// let it happen, an errno value to make it fail, or kShortTransfer to let read and write transfer
// one byte only. Thread-safe if the hook is; set it while no call runs.
using FileFaultHook =
    std::function<int(const char* call, const std::string& path, std::int64_t nth)>;
constexpr int kShortTransfer = -1;
// An empty hook removes it.
void set_file_fault_hook(FileFaultHook hook);

// For tests: what free_bytes() says of a path instead of what the system does. Thread-safe if the
// hook is. An empty hook removes it.
using FreeBytesHook = std::function<std::int64_t(const std::string& path)>;
void set_free_bytes_hook(FreeBytesHook hook);

}  // namespace birkhoff
