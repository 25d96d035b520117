// Checked file I/O. All files that we write, and all inputs whose errors users must see, go through
// it. A failed call throws an Error that names the call, the path, the system's reason and what to
// do. Interrupted calls are repeated and short transfers continued. A failed fsync is final,
// because the kernel may have dropped the pages. Local to the calling rank. A File belongs to one
// thread at a time; only pread_exact may be called from several.
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
  // Opens a regular file. Errors in the input itself (missing, truncated, a folder, or a pipe or
  // device, which might never end) carry `code`; errors of the system (permissions, limits, EIO)
  // carry kStorage.
  static File open_for_read(const std::string& path, ExitCode code = ExitCode::kStorage);
  // The same for a file or a pipe (a FIFO, or a shell's <(command)). A pipe must have a writer
  // within kPipeSeconds.
  static File open_stream_for_read(const std::string& path, ExitCode code = ExitCode::kStorage);
  // Creates a new file. An existing file is an error.
  static File create(const std::string& path);
  // Opens a file for writing at its end; creates it if it is missing. A FIFO is an error.
  static File open_for_append(const std::string& path);
  // The rest of standard input. Error(kUsage) if it is closed.
  static File standard_input();

  static constexpr int kPipeSeconds = 5;

  void write_all(const void* data, std::size_t num_bytes);
  void write_all(std::string_view bytes) { write_all(bytes.data(), bytes.size()); }
  // Reads at most num_bytes and returns how many it has read; 0 at the end of the file.
  std::size_t read_some(void* out, std::size_t num_bytes);
  // Reads exactly num_bytes at `offset`. A file that ends earlier is an error.
  void pread_exact(void* out, std::size_t num_bytes, std::int64_t offset) const;
  // Asks the system to read these bytes in the background, because they will be read soon. Only a
  // hint: it has no errors and no effect on file systems without a page cache.
  void will_read(std::size_t num_bytes, std::int64_t offset) const;
  std::int64_t size() const;
  // Returns when read_some() would not block. A pipe that delivers nothing for kPipeSeconds is an
  // error.
  void wait_for_input() const;
  // Returns when everything written is on the device.
  void sync();
  // Call it on a written file before destruction: the destructor does not check for errors.
  void close();

  const std::string& path() const { return path_; }
  // A path that opens the same file again in this process while this object exists, even after the
  // file's name is gone.
  std::string descriptor_path() const;

 private:
  File(std::string path, UniqueHandle<FileDescriptorTraits> fd, ExitCode code);
  static File open_kinds(const std::string& path, ExitCode code, bool pipes);
  struct stat status() const;
  void wait_for_writer() const;
  UniqueHandle<FileDescriptorTraits> fd_;
  std::string path_;
  ExitCode code_ = ExitCode::kStorage;
};

// PATH.tmp-HOST-PROCESS-RANDOM: a name for a file that is to become `path`, which no other process
// uses. Containers that share a file system may have equal process ids.
std::string temporary_name(const std::string& path);
// Writes the file such that, whatever happens, it holds either its old content or all of `bytes`: a
// temporary file in the same folder, fsync, rename, fsync of the folder. A crash may leave the
// temporary file.
void write_file_durably(const std::string& path, std::string_view bytes);
// The same with the content that `write` writes, piece by piece, to the temporary file.
void write_file_durably(const std::string& path, const std::function<void(File&)>& write);
// The same without fsync: cheap, but after a crash of the machine the file may be empty.
void replace_file(const std::string& path, std::string_view bytes);
// Reads the whole file. A file larger than max_bytes is an error.
std::string read_file(const std::string& path, std::int64_t max_bytes,
                      ExitCode code = ExitCode::kStorage);
// The same for a file or a pipe. A pipe must not pause for kPipeSeconds.
std::string read_stream(const std::string& path, std::int64_t max_bytes,
                        ExitCode code = ExitCode::kStorage);
// The same for File::standard_input(), which may pause for any time.
std::string read_standard_input(std::int64_t max_bytes);

// Fills `status` by stat, or by lstat if follow_links is false. Returns false and leaves the reason
// in errno if the path names nothing. Any other error throws, with `code` if the path cannot name a
// file.
bool find_status(const std::string& path, bool follow_links, struct stat* status,
                 ExitCode code = ExitCode::kStorage);
// True if the path names anything (path_exists) or a directory (is_directory). Any error other than
// "does not exist" throws.
bool path_exists(const std::string& path);
bool is_directory(const std::string& path);
// True for a FIFO, or a shell's <(command).
bool is_pipe(const std::string& path);
std::int64_t file_size(const std::string& path, ExitCode code = ExitCode::kStorage);
// Creates the directory and its missing parents; an existing directory is fine. Durable, even if
// the directory was created by a process that was killed.
void make_directory(const std::string& path);
// Names (not paths) in a directory, sorted, without . and ..
std::vector<std::string> list_directory(const std::string& path,
                                        ExitCode code = ExitCode::kStorage);
// Atomic within one file system, and durable: syncs the folders of both names. Replaces an existing
// file, but never a directory that is not empty.
void rename_path(const std::string& from, const std::string& to);
void remove_file(const std::string& path);
// Removes a file, or a directory with its contents. Does nothing if the path does not exist. Does
// not follow symbolic links.
void remove_tree(const std::string& path);
// Makes the names in a directory durable.
void sync_directory(const std::string& path);
// Bytes that this user may still write to the file system of `path`. Ignores quotas. Returns the
// largest number if the file system does not report its size.
std::int64_t free_bytes(const std::string& path);
// The folder part of a path: "a/b" -> "a", "b" -> ".", "/b" -> "/".
std::string parent_path(const std::string& path);

// The name of this machine, or of the container that the process is in.
std::string host_name();

// An exclusive lock (flock) on the file `path`, held until destruction. The file stays and names
// its last holder. Error(kUsage) with the holder's host and process if another process holds the
// lock.
class FileLock {
 public:
  // what: the name of the locked thing in the message, such as "the run folder /x".
  FileLock(const std::string& path, const std::string& what);

  // False on a file system without locks: then the object guards nothing.
  bool is_held() const { return is_held_; }

 private:
  UniqueHandle<FileDescriptorTraits> fd_;
  bool is_held_ = false;
};

// The holder of a FileLock, as the lock file names it; nullopt if the lock is free, the file does
// not exist or its file system has no locks. Takes a shared lock for a moment, which also works on
// network file systems. FileLock waits that long, so this call never keeps a process from taking
// the lock.
std::optional<std::string> lock_holder(const std::string& path);

// For tests: called before each system call made here with the call's name ("open", "write",
// "pread", "fsync", "rename", ...), its path and its number since the hook was set. Returns 0 to
// let the call happen, an errno value to make it fail, or kShortTransfer to let read and write
// transfer only one byte. Thread-safe if the hook is; set it while no call runs.
using FileFaultHook =
    std::function<int(const char* call, const std::string& path, std::int64_t nth)>;
constexpr int kShortTransfer = -1;
// An empty hook removes it.
void set_file_fault_hook(FileFaultHook hook);

// For tests: what free_bytes() returns for a path instead of the system's answer. Thread-safe if
// the hook is. An empty hook removes it.
using FreeBytesHook = std::function<std::int64_t(const std::string& path)>;
void set_free_bytes_hook(FreeBytesHook hook);

}  // namespace birkhoff
