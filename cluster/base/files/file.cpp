#include "cluster/base/files/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "cluster/base/files/system_call.h"

namespace birkhoff {
namespace {

using Descriptor = UniqueHandle<FileDescriptorTraits>;

std::atomic<FreeBytesHook*> current_free_bytes_hook = nullptr;

Descriptor open_descriptor(const std::string& path, int flags, ExitCode code = ExitCode::kStorage) {
  Descriptor fd(static_cast<int>(
      retried("open", path, [&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); })));
  check_call(fd.get(), "open", path, code);
  return fd;
}

}  // namespace

void set_free_bytes_hook(FreeBytesHook hook) {
  delete current_free_bytes_hook.exchange(hook ? new FreeBytesHook(std::move(hook)) : nullptr);
}

void FileDescriptorTraits::close(Handle fd) noexcept { ::close(fd); }

// ---- File

File::File(std::string path, Descriptor fd, ExitCode code)
    : fd_(std::move(fd)), path_(std::move(path)), code_(code) {}

File File::open_for_read(const std::string& path, ExitCode code) {
  return open_kinds(path, code, /*pipes=*/false);
}

File File::open_stream_for_read(const std::string& path, ExitCode code) {
  return open_kinds(path, code, /*pipes=*/true);
}

File File::open_kinds(const std::string& path, ExitCode code, bool pipes) {
  // Without O_NONBLOCK the call would wait for a pipe's writer. For a regular file the flag has no
  // effect.
  File file(path, open_descriptor(path, O_RDONLY | O_NONBLOCK | O_NOCTTY, code), code);
  const mode_t mode = file.status().st_mode;
  // A folder passes here: reading it fails with a clear error.
  if (S_ISREG(mode) || S_ISDIR(mode)) return file;
  if (!pipes || !S_ISFIFO(mode)) {
    fail(code, "'{}' is {}, not a regular file; name a file{}", path,
         S_ISFIFO(mode) ? "a FIFO" : "a device", pipes ? " or a pipe" : "");
  }
  file.wait_for_writer();
  check_call(::fcntl(file.fd_.get(), F_SETFL, O_RDONLY), "fcntl", path, code);
  return file;
}

void File::wait_for_writer() const {
  // tee() copies data without consuming it. It returns 0 if there is no data and no writer.
  int scratch[2];
  check_call(::pipe2(scratch, O_CLOEXEC | O_NONBLOCK), "pipe2", path_, code_);
  const Descriptor out(scratch[0]), in(scratch[1]);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(kPipeSeconds);
  while (::tee(fd_.get(), in.get(), 1, SPLICE_F_NONBLOCK) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      fail(code_, "'{}' is a pipe that had no writer for {} s; name a file, or start its writer",
           path_, kPipeSeconds);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void File::wait_for_input() const {
  pollfd input{.fd = fd_.get(), .events = POLLIN, .revents = 0};
  const std::int64_t ready =
      retried("poll", path_, [&] { return ::poll(&input, 1, 1000 * kPipeSeconds); });
  check_call(ready, "poll", path_, code_);
  if (ready > 0) return;
  fail(code_, "'{}' is a pipe that delivered nothing for {} s; name a file, or check its writer",
       path_, kPipeSeconds);
}

File File::create(const std::string& path) {
  return File(path, open_descriptor(path, O_WRONLY | O_CREAT | O_EXCL), ExitCode::kStorage);
}

File File::open_for_append(const std::string& path) {
  // Without O_NONBLOCK the call would wait for a pipe's reader.
  File file(path, open_descriptor(path, O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK),
            ExitCode::kStorage);
  if (S_ISFIFO(file.status().st_mode)) {
    fail(ExitCode::kStorage, "'{}' is a FIFO, not a regular file; remove it or choose another name",
         path);
  }
  return file;
}

// Duplicates the descriptor: opening /dev/stdin again would wait for another writer of a FIFO, and
// would read a file from its start.
File File::standard_input() {
  const int flags = ::fcntl(STDIN_FILENO, F_GETFL);
  if (flags < 0 || (flags & O_ACCMODE) == O_WRONLY) {
    fail(ExitCode::kUsage, "standard input is closed; redirect the text to it, or name a file");
  }
  const std::string path = "/dev/stdin";
  Descriptor fd(static_cast<int>(
      retried("dup", path, [&] { return ::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0); })));
  check_call(fd.get(), "dup", path);
  return File(path, std::move(fd), ExitCode::kData);
}

void File::write_all(const void* data, std::size_t num_bytes) {
  const char* next = static_cast<const char*>(data);
  std::size_t left = num_bytes;
  while (left > 0) {
    const std::int64_t written = retried_transfer(
        "write", path_, left, [&](std::size_t n) { return ::write(fd_.get(), next, n); });
    if (written < 0) fail_call("write", path_, fmt::format(" with {} bytes to go", left));
    next += written;
    left -= static_cast<std::size_t>(written);
  }
}

std::size_t File::read_some(void* out, std::size_t num_bytes) {
  const std::int64_t num_read = retried_transfer(
      "read", path_, num_bytes, [&](std::size_t n) { return ::read(fd_.get(), out, n); });
  check_call(num_read, "read", path_, code_);
  return static_cast<std::size_t>(num_read);
}

void File::pread_exact(void* out, std::size_t num_bytes, std::int64_t offset) const {
  char* next = static_cast<char*>(out);
  std::size_t left = num_bytes;
  while (left > 0) {
    const std::int64_t num_read = retried_transfer("pread", path_, left, [&](std::size_t n) {
      return ::pread(fd_.get(), next, n, static_cast<off_t>(offset));
    });
    if (num_read < 0) fail_call("pread", path_, fmt::format(" at offset {}", offset), code_);
    if (num_read == 0) {
      fail(code_, "'{}' ends at byte {}, {} bytes short: it was truncated; restore or recreate it",
           path_, offset, left);
    }
    next += num_read;
    left -= static_cast<std::size_t>(num_read);
    offset += num_read;
  }
}

void File::will_read(std::size_t num_bytes, std::int64_t offset) const {
  ::posix_fadvise(fd_.get(), offset, static_cast<off_t>(num_bytes), POSIX_FADV_WILLNEED);
}

std::string File::descriptor_path() const { return fmt::format("/proc/self/fd/{}", fd_.get()); }

std::int64_t File::size() const { return status().st_size; }

struct stat File::status() const {
  struct stat status;
  check_call(retried("fstat", path_, [&] { return ::fstat(fd_.get(), &status); }), "fstat", path_,
             code_);
  return status;
}

void File::sync() { sync_descriptor(fd_.get(), path_); }

void File::close() {
  const int fault = next_fault("close", path_);
  // Linux frees the descriptor even if close fails or is interrupted, so close is never repeated.
  int result = ::close(fd_.release());
  if (fault > 0) {
    errno = fault;
    result = -1;
  }
  if (result < 0 && errno != EINTR) check_call(result, "close", path_);
}

// ---- Whole files

std::string temporary_name(const std::string& path) {
  std::random_device random;
  return fmt::format("{}.tmp-{}-{}-{:08x}", path, host_name(), ::getpid(), random());
}

namespace {

void rename_without_sync(const std::string& from, const std::string& to) {
  const std::int64_t result =
      retried("rename", from, [&] { return ::rename(from.c_str(), to.c_str()); });
  if (result < 0) fail_call("rename", from, fmt::format(" (to '{}')", to));
}

void replace(const std::string& path, const std::function<void(File&)>& write, bool durably) {
  const std::string temporary = temporary_name(path);
  File file = File::create(temporary);
  try {
    write(file);
    if (durably) file.sync();
    file.close();
    durably ? rename_path(temporary, path) : rename_without_sync(temporary, path);
  } catch (...) {
    ::unlink(temporary.c_str());  // the first error is the one to report
    throw;
  }
}

}  // namespace

void write_file_durably(const std::string& path, std::string_view bytes) {
  write_file_durably(path, [&](File& file) { file.write_all(bytes); });
}

void write_file_durably(const std::string& path, const std::function<void(File&)>& write) {
  replace(path, write, /*durably=*/true);
}

void replace_file(const std::string& path, std::string_view bytes) {
  replace(
      path, [&](File& file) { file.write_all(bytes); }, /*durably=*/false);
}

namespace {

std::string read_whole(File file, std::int64_t max_bytes, ExitCode code, bool waits) {
  std::string bytes;
  // Reads until the end instead of asking for the size: pipes and files in /proc have none.
  for (;;) {
    if (waits) file.wait_for_input();
    const std::size_t kChunk = std::max<std::size_t>(65536, bytes.size());
    const std::size_t old_size = bytes.size();
    bytes.resize(old_size + kChunk);
    const std::size_t num_read = file.read_some(bytes.data() + old_size, kChunk);
    bytes.resize(old_size + num_read);
    if (num_read == 0) return bytes;
    if (static_cast<std::int64_t>(bytes.size()) > max_bytes) {
      fail(code, "'{}' is larger than the {} bytes allowed here; check that it is the right file",
           file.path(), max_bytes);
    }
  }
}

}  // namespace

std::string read_file(const std::string& path, std::int64_t max_bytes, ExitCode code) {
  return read_whole(File::open_for_read(path, code), max_bytes, code, /*waits=*/false);
}

std::string read_stream(const std::string& path, std::int64_t max_bytes, ExitCode code) {
  return read_whole(File::open_stream_for_read(path, code), max_bytes, code, /*waits=*/true);
}

std::string read_standard_input(std::int64_t max_bytes) {
  return read_whole(File::standard_input(), max_bytes, ExitCode::kData, /*waits=*/false);
}

// ---- Names

bool find_status(const std::string& path, bool follow_links, struct stat* status, ExitCode code) {
  const std::int64_t result = retried("stat", path, [&] {
    return follow_links ? ::stat(path.c_str(), status) : ::lstat(path.c_str(), status);
  });
  if (result < 0 && (errno == ENOENT || errno == ENOTDIR)) return false;
  check_call(result, "stat", path, code);
  return true;
}

bool is_pipe(const std::string& path) {
  struct stat status;
  return find_status(path, /*follow_links=*/true, &status) && S_ISFIFO(status.st_mode);
}

bool path_exists(const std::string& path) {
  struct stat status;
  return find_status(path, /*follow_links=*/false, &status);
}

bool is_directory(const std::string& path) {
  struct stat status;
  return find_status(path, /*follow_links=*/true, &status) && S_ISDIR(status.st_mode);
}

std::int64_t file_size(const std::string& path, ExitCode code) {
  return File::open_for_read(path, code).size();
}

std::string parent_path(const std::string& path) {
  std::string name = path;
  while (name.size() > 1 && name.back() == '/') name.pop_back();
  const std::size_t slash = name.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : name.substr(0, slash);
}

void make_directory(const std::string& path) {
  const std::string parent = parent_path(path);
  if (is_directory(path)) {
    // The process that created it may have been killed before it synced the name. The directory is
    // empty then. A process that may not write to the parent did not create it and need not sync.
    if (list_directory(path).empty() && ::access(parent.c_str(), R_OK | W_OK) == 0) {
      sync_directory(parent);
    }
    return;
  }
  if (parent != path) make_directory(parent);
  const std::int64_t result = retried("mkdir", path, [&] { return ::mkdir(path.c_str(), 0777); });
  const bool another_was_faster = result < 0 && errno == EEXIST && is_directory(path);
  if (!another_was_faster) check_call(result, "mkdir", path);
  sync_directory(parent);
}

std::vector<std::string> list_directory(const std::string& path, ExitCode code) {
  struct CloseDirectory {
    void operator()(DIR* directory) const { ::closedir(directory); }
  };
  DIR* opened = nullptr;
  check_call(retried("opendir", path,
                     [&] { return (opened = ::opendir(path.c_str())) == nullptr ? -1 : 0; }),
             "opendir", path, code);
  const std::unique_ptr<DIR, CloseDirectory> directory(opened);
  std::vector<std::string> names;
  for (;;) {
    const dirent* entry = nullptr;
    check_call(retried("readdir", path,
                       [&] {
                         errno = 0;
                         entry = ::readdir(directory.get());
                         return entry == nullptr && errno != 0 ? -1 : 0;
                       }),
               "readdir", path, code);
    if (entry == nullptr) break;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void rename_path(const std::string& from, const std::string& to) {
  rename_without_sync(from, to);
  sync_directory(parent_path(to));
  if (parent_path(from) != parent_path(to)) sync_directory(parent_path(from));
}

void remove_file(const std::string& path) {
  check_call(retried("unlink", path, [&] { return ::unlink(path.c_str()); }), "unlink", path);
}

void remove_tree(const std::string& path) {
  struct stat status;
  if (!find_status(path, /*follow_links=*/false, &status)) return;
  if (!S_ISDIR(status.st_mode)) return remove_file(path);
  for (const std::string& name : list_directory(path)) remove_tree(path + "/" + name);
  check_call(retried("rmdir", path, [&] { return ::rmdir(path.c_str()); }), "rmdir", path);
}

void sync_directory(const std::string& path) {
  const Descriptor fd = open_descriptor(path, O_RDONLY | O_DIRECTORY);
  sync_descriptor(fd.get(), path);
}

std::int64_t free_bytes(const std::string& path) {
  if (FreeBytesHook* hook = current_free_bytes_hook.load(std::memory_order_acquire)) {
    return (*hook)(path);
  }
  struct statvfs status;
  check_call(retried("statvfs", path, [&] { return ::statvfs(path.c_str(), &status); }), "statvfs",
             path);
  constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (status.f_blocks == 0 || status.f_frsize == 0) return static_cast<std::int64_t>(kMax);
  const auto blocks = std::min<std::uint64_t>(status.f_bavail, kMax / status.f_frsize);
  return static_cast<std::int64_t>(blocks * status.f_frsize);
}

// ---- FileLock

namespace {

// Lustre without the mount option flock, NFS without lockd, and some FUSE file systems.
bool has_no_locks(int error) { return error == ENOSYS || error == ENOLCK || error == EOPNOTSUPP; }

std::string holder_of(const std::string& path) {
  const std::string holder = read_file(path, 4096);
  return holder.empty() ? "another process" : holder;
}

}  // namespace

std::string host_name() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return host.data();
}

FileLock::FileLock(const std::string& path, const std::string& what)
    : fd_(open_descriptor(path, O_RDWR | O_CREAT)) {
  const auto try_lock = [&] {
    return retried("flock", path, [&] { return ::flock(fd_.get(), LOCK_EX | LOCK_NB); });
  };
  std::int64_t locked = try_lock();
  // lock_holder() may hold its shared lock, for a moment.
  for (int tries = 0; locked < 0 && errno == EWOULDBLOCK && tries < 20; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    locked = try_lock();
  }
  if (locked < 0 && errno == EWOULDBLOCK) {
    fail(ExitCode::kUsage, "{} is in use by {} (lock '{}'): wait for it or stop it", what,
         holder_of(path), path);
  }
  is_held_ = locked == 0;
  if (!is_held_ && !has_no_locks(errno)) fail_call("flock", path, "");
  const std::string holder = fmt::format("process {} on {}", ::getpid(), host_name());
  check_call(retried("ftruncate", path, [&] { return ::ftruncate(fd_.get(), 0); }), "ftruncate",
             path);
  const std::int64_t written =
      retried("pwrite", path, [&] { return ::pwrite(fd_.get(), holder.data(), holder.size(), 0); });
  check_call(written, "pwrite", path);
}

std::optional<std::string> lock_holder(const std::string& path) {
  if (!path_exists(path)) return std::nullopt;
  const Descriptor fd = open_descriptor(path, O_RDONLY);
  const std::int64_t locked =
      retried("flock", path, [&] { return ::flock(fd.get(), LOCK_SH | LOCK_NB); });
  if (locked == 0 || has_no_locks(errno)) return std::nullopt;
  if (errno != EWOULDBLOCK) fail_call("flock", path, "");
  return holder_of(path);
}

}  // namespace birkhoff
