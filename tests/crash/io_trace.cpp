#include "tests/crash/io_trace.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using Kind = IoEvent::Kind;

class Recorder {
 public:
  explicit Recorder(const fs::path& folder) : folder_(folder.string()) {}

  // The path relative to the folder, if it is below it.
  std::optional<std::string> relative(const std::string& path) const {
    if (path == folder_) return "";
    if (!path.starts_with(folder_ + "/")) return std::nullopt;
    return path.substr(folder_.size() + 1);
  }
  void opened(int fd, const char* name, int flags) {
    open_files_.erase(fd);  // a file that had this descriptor was closed unseen
    const auto path = relative(name);
    if (!path) return;
    open_files_[fd] = events_.size();
    IoEvent& event = add(Kind::kOpen, *path);
    event.truncates = (flags & O_TRUNC) != 0;
  }
  void closed(int fd) { open_files_.erase(fd); }
  // Adds an event on an open file; null if the file is not recorded.
  IoEvent* on_file(Kind kind, int fd) {
    const auto found = open_files_.find(fd);
    if (found == open_files_.end()) return nullptr;
    IoEvent& event = add(kind, "");
    event.opened = found->second;
    return &event;
  }
  void written(int fd, const void* data, std::int64_t num_bytes, std::int64_t offset) {
    if (IoEvent* event = on_file(Kind::kWrite, fd)) {
      event->offset = offset;
      event->bytes.assign(static_cast<const char*>(data), static_cast<std::size_t>(num_bytes));
    }
  }
  void named(Kind kind, const char* name) {
    if (const auto path = relative(name)) add(kind, *path);
  }
  void renamed(const char* from, const char* to) {
    const auto path = relative(from), new_path = relative(to);
    if (path && new_path) add(Kind::kRename, *path).new_path = *new_path;
  }
  void linked(const char* from, const char* to) {
    const auto path = relative(from), new_path = relative(to);
    if (path && new_path) add(Kind::kLink, *path).new_path = *new_path;
  }
  IoEvent& add(Kind kind, const std::string& path) {
    IoEvent& event = events_.emplace_back();
    event.kind = kind;
    event.path = path;
    return event;
  }

  std::mutex& mutex() { return mutex_; }
  std::vector<IoEvent> take_events() { return std::move(events_); }

 private:
  const std::string folder_;
  std::mutex mutex_;
  std::map<int, std::size_t> open_files_;  // by descriptor: the event that opened it
  std::vector<IoEvent> events_;
};

std::atomic<Recorder*> current_recorder = nullptr;

// Makes the call and records it if it succeeds while a recording is active. One lock covers both,
// so the order of the events is the order of their effects.
template <typename Call, typename Note>
auto recorded(Call call, Note note) {
  Recorder* recorder = current_recorder.load(std::memory_order_acquire);
  if (recorder == nullptr) return call();
  const std::lock_guard lock(recorder->mutex());
  const auto result = call();
  if (result >= 0) {
    const int error = errno;
    note(*recorder, result);
    errno = error;
  }
  return result;
}

// libc's function, or a sanitizer's function in front of it.
template <typename Function>
Function* next(const char* name) {
  void* found = ::dlsym(RTLD_NEXT, name);
  if (found == nullptr) std::abort();
  return reinterpret_cast<Function*>(found);
}

template <typename Open>
int record_open(Open* open_file, const char* path, int flags, mode_t mode) {
  return recorded([&] { return open_file(path, flags, mode); },
                  [&](Recorder& recorder, int fd) { recorder.opened(fd, path, flags); });
}

template <typename Pwrite, typename Offset>
ssize_t record_pwrite(Pwrite* pwrite_file, int fd, const void* data, std::size_t size,
                      Offset offset) {
  return recorded(
      [&] { return pwrite_file(fd, data, size, offset); },
      [&](Recorder& recorder, ssize_t written) { recorder.written(fd, data, written, offset); });
}

template <typename Truncate, typename Size>
int record_truncate(Truncate* truncate_file, int fd, Size size) {
  return recorded([&] { return truncate_file(fd, size); },
                  [&](Recorder& recorder, int) {
                    if (IoEvent* event = recorder.on_file(Kind::kTruncate, fd)) {
                      event->offset = size;
                    }
                  });
}

int record_sync(int (*sync_file)(int), int fd) {
  return recorded([&] { return sync_file(fd); },
                  [&](Recorder& recorder, int) { recorder.on_file(Kind::kSync, fd); });
}

// Calls on one path.
template <typename Call>
int record_name(Kind kind, const char* path, Call call) {
  return recorded(call, [&](Recorder& recorder, int) { recorder.named(kind, path); });
}

}  // namespace

FileTree read_tree(const fs::path& folder) {
  FileTree tree;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    Content& content = tree[entry.path().lexically_relative(folder).string()];
    if (entry.is_directory()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    std::stringstream bytes;
    bytes << file.rdbuf();
    content = std::make_shared<const std::string>(std::move(bytes).str());
  }
  return tree;
}

void write_tree(const FileTree& tree, const fs::path& folder) {
  for (const auto& [path, content] : tree) {  // in this order folders come before their content
    if (content == nullptr) {
      fs::create_directory(folder / path);
      continue;
    }
    std::ofstream file(folder / path, std::ios::binary);
    file.write(content->data(), static_cast<std::streamsize>(content->size()));
    file.close();
    if (!file) throw std::runtime_error("cannot write " + (folder / path).string());
  }
}

IoTrace record_io(const fs::path& folder, const std::function<void()>& body) {
  IoTrace trace;
  trace.before = read_tree(folder);
  Recorder recorder(folder);
  struct Recording {
    explicit Recording(Recorder* recorder) {
      if (current_recorder.exchange(recorder) != nullptr) {
        throw std::logic_error("one recording at a time");
      }
    }
    ~Recording() { current_recorder = nullptr; }
  };
  {
    const Recording recording(&recorder);
    body();
  }
  trace.events = recorder.take_events();
  trace.after = read_tree(folder);
  return trace;
}

void mark_io(std::int64_t mark) {
  Recorder* recorder = current_recorder;
  if (recorder == nullptr) return;
  const std::lock_guard lock(recorder->mutex());
  recorder->add(Kind::kMark, "").mark = mark;
}

std::string describe(const IoTrace& trace, std::size_t number) {
  const IoEvent& event = trace.events.at(number);
  const auto file = [&] { return trace.events.at(event.opened).path; };
  switch (event.kind) {
    case Kind::kOpen:
      return fmt::format("open {}", event.path);
    case Kind::kWrite:
      return fmt::format("write of {} bytes at {} to {}", event.bytes.size(), event.offset, file());
    case Kind::kTruncate:
      return fmt::format("truncation to {} bytes of {}", event.offset, file());
    case Kind::kSync:
      return fmt::format("sync of {}", file().empty() ? "the folder" : file());
    case Kind::kRename:
      return fmt::format("rename {} to {}", event.path, event.new_path);
    case Kind::kLink:
      return fmt::format("link {} to {}", event.path, event.new_path);
    case Kind::kMakeFolder:
      return fmt::format("mkdir {}", event.path);
    case Kind::kRemoveFile:
      return fmt::format("unlink {}", event.path);
    case Kind::kRemoveFolder:
      return fmt::format("rmdir {}", event.path);
    case Kind::kMark:
      return fmt::format("mark {}", event.mark);
  }
  throw std::logic_error("kind of event");
}

}  // namespace birkhoff

// ---- Functions that the process calls instead of libc's.

extern "C" {

int open(const char* path, int flags, ...) {
  static auto* const real = birkhoff::next<decltype(::open)>("open");
  mode_t mode = 0;
  if (__OPEN_NEEDS_MODE(flags)) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return birkhoff::record_open(real, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  static auto* const real = birkhoff::next<decltype(::open64)>("open64");
  mode_t mode = 0;
  if (__OPEN_NEEDS_MODE(flags)) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return birkhoff::record_open(real, path, flags, mode);
}

int close(int fd) {
  static auto* const real = birkhoff::next<decltype(::close)>("close");
  return birkhoff::recorded([&] { return real(fd); },
                            [&](auto& recorder, int) { recorder.closed(fd); });
}

ssize_t write(int fd, const void* data, size_t size) {
  static auto* const real = birkhoff::next<decltype(::write)>("write");
  return birkhoff::recorded([&] { return real(fd, data, size); },
                            [&](auto& recorder, ssize_t written) {
                              // After the call the position is its end, also after O_APPEND.
                              recorder.written(fd, data, written,
                                               ::lseek(fd, 0, SEEK_CUR) - written);
                            });
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  static auto* const real = birkhoff::next<decltype(::pwrite)>("pwrite");
  return birkhoff::record_pwrite(real, fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
  static auto* const real = birkhoff::next<decltype(::pwrite64)>("pwrite64");
  return birkhoff::record_pwrite(real, fd, data, size, offset);
}

int ftruncate(int fd, off_t size) noexcept {
  static auto* const real = birkhoff::next<int(int, off_t)>("ftruncate");
  return birkhoff::record_truncate(real, fd, size);
}

int ftruncate64(int fd, off64_t size) noexcept {
  static auto* const real = birkhoff::next<int(int, off64_t)>("ftruncate64");
  return birkhoff::record_truncate(real, fd, size);
}

int fsync(int fd) {
  static auto* const real = birkhoff::next<int(int)>("fsync");
  return birkhoff::record_sync(real, fd);
}

int fdatasync(int fd) {
  static auto* const real = birkhoff::next<int(int)>("fdatasync");
  return birkhoff::record_sync(real, fd);
}

int rename(const char* from, const char* to) noexcept {
  static auto* const real = birkhoff::next<int(const char*, const char*)>("rename");
  return birkhoff::recorded([&] { return real(from, to); },
                            [&](auto& recorder, int) { recorder.renamed(from, to); });
}

int link(const char* from, const char* to) noexcept {
  static auto* const real = birkhoff::next<int(const char*, const char*)>("link");
  return birkhoff::recorded([&] { return real(from, to); },
                            [&](auto& recorder, int) { recorder.linked(from, to); });
}

int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const real = birkhoff::next<int(const char*, mode_t)>("mkdir");
  return birkhoff::record_name(birkhoff::IoEvent::Kind::kMakeFolder, path,
                               [&] { return real(path, mode); });
}

int unlink(const char* path) noexcept {
  static auto* const real = birkhoff::next<int(const char*)>("unlink");
  return birkhoff::record_name(birkhoff::IoEvent::Kind::kRemoveFile, path,
                               [&] { return real(path); });
}

int rmdir(const char* path) noexcept {
  static auto* const real = birkhoff::next<int(const char*)>("rmdir");
  return birkhoff::record_name(birkhoff::IoEvent::Kind::kRemoveFolder, path,
                               [&] { return real(path); });
}

}  // extern "C"
