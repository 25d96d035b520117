#include "cluster/base/files/lease.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "cluster/base/files/file.h"
#include "cluster/base/files/system_call.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kMaxRecordBytes = 4096;

// The scope of a process id: one boot of one machine, one namespace. Machines may have the same
// name, and their first namespaces have the same number.
std::string process_space() {
  std::error_code error;
  const fs::path space = fs::read_symlink("/proc/self/ns/pid", error);
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  return fmt::format("{} {} {}", host_name(), boot, space.string());
}

// When the process started, in ticks since boot; empty if unknown.
std::string start_of(std::int64_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string stat;
  std::getline(file, stat);
  // The name, in parentheses, may hold spaces; the start is the 20th field after it.
  std::size_t at = stat.rfind(')');
  for (int field = 0; field < 20 && at != std::string::npos; ++field) at = stat.find(' ', at + 1);
  return at == std::string::npos ? "" : stat.substr(at + 1, stat.find(' ', at + 1) - at - 1);
}

struct Record {
  std::int64_t number = 0;
  std::string holder, host{}, space{}, start{};  // for messages; machine; see process_space()
  std::int64_t process = 0;
  bool held = true;
};

std::string record_text(bool held) {
  const std::string host = host_name();
  const nlohmann::ordered_json record = {
      {"holder", fmt::format("process {} on {}", ::getpid(), host)},
      {"host", host},
      {"space", process_space()},
      {"process", ::getpid()},
      {"start", start_of(::getpid())},
      {"held", held}};
  return record.dump() + "\n";
}

std::string file_of(const fs::path& folder, std::int64_t number) {
  return (folder / fmt::format("{}{}", kHolderPrefix, number)).string();
}

struct HolderName {
  std::int64_t number = 0;
  bool is_record = false;  // else a temporary file that may become one
};

// nullopt: not the name of a holder's file.
std::optional<HolderName> parse_name(const std::string& name) {
  if (!name.starts_with(kHolderPrefix)) return std::nullopt;
  const char *begin = name.data() + kHolderPrefix.size(), *end = name.data() + name.size();
  HolderName parsed;
  const auto [rest, error] = std::from_chars(begin, end, parsed.number);
  parsed.is_record = rest == end;
  return error == std::errc() ? std::optional(parsed) : std::nullopt;
}

// Paths of the holders' files by number.
std::map<std::int64_t, std::string> holders_in(const fs::path& folder) {
  std::map<std::int64_t, std::string> holders;
  for (const std::string& name : list_directory(folder.string())) {
    const auto parsed = parse_name(name);
    if (parsed && parsed->is_record) holders[parsed->number] = (folder / name).string();
  }
  return holders;
}

std::optional<Record> newest_holder(const fs::path& folder) {
  const auto holders = holders_in(folder);
  if (holders.empty()) return std::nullopt;
  const auto& [number, path] = *holders.rbegin();
  std::string text;
  try {
    text = read_file(path, kMaxRecordBytes);
  } catch (const Error&) {
    if (path_exists(path)) throw;
    return newest_holder(folder);  // a newer one has just removed it
  }
  Record record{.number = number, .holder = "another process"};
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto read = [&](const char* key, auto& value) {
    try {
      if (json.is_object()) value = json.value(key, value);
    } catch (const nlohmann::json::exception&) {  // another version's record
    }
  };
  read("holder", record.holder);
  read("host", record.host);
  read("space", record.space);
  read("start", record.start);
  read("process", record.process);
  read("held", record.held);
  if (text.empty()) record.held = false;  // the machine crashed before it wrote that
  return record;
}

// A process holds a folder at most once: a record of its own belongs to a destroyed object.
bool has_ended(const Record& record) {
  if (record.process <= 0 || record.space != process_space()) return false;
  if (record.process == ::getpid()) return true;
  const auto process = static_cast<pid_t>(record.process);
  if (::kill(process, 0) != 0) return errno == ESRCH;
  const std::string start = start_of(record.process);
  return !start.empty() && start != record.start;  // the number is another process's now
}

// Opening the file makes a network file system ask for its present state.
std::optional<std::pair<std::int64_t, std::int64_t>> last_touch(const std::string& path) {
  const UniqueHandle<FileDescriptorTraits> fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (fd.get() < 0 || ::fstat(fd.get(), &status) != 0) return std::nullopt;
  return std::pair<std::int64_t, std::int64_t>(status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
}

// Waits until the holder renews its lease (false) or it expires (true).
bool expires(const fs::path& folder, const Record& record, LeaseTimes times) {
  const std::string path = file_of(folder, record.number);
  const auto seen = last_touch(path);
  for (const auto until = Clock::now() + times.expires; Clock::now() < until;) {
    std::this_thread::sleep_for(times.renew / 10);
    if (last_touch(path) != seen) return false;
  }
  return true;
}

// Another process may have removed it.
void remove_if_there(const std::string& path) {
  const std::int64_t removed = retried("unlink", path, [&] { return ::unlink(path.c_str()); });
  if (removed < 0 && errno != ENOENT) check_call(removed, "unlink", path);
}

// Removes the files of earlier holders, and files left by processes that did not become holders. In
// ascending order: at each moment an earlier holder either misses its own file or sees the next
// one.
void remove_earlier(const fs::path& folder, std::int64_t number) {
  std::multimap<std::int64_t, std::string> earlier;
  for (const std::string& name : list_directory(folder.string())) {
    const auto parsed = parse_name(name);
    if (parsed && parsed->number < number) {
      earlier.emplace(parsed->number, (folder / name).string());
    }
  }
  for (const auto& [of_file, path] : earlier) remove_if_there(path);
}

// Creates the file, complete from its first moment on. Returns false if it exists, or if a later
// holder has removed the temporary file.
bool create_record(const std::string& path) {
  const std::string complete = temporary_name(path);
  // If it stays, the next holder removes it.
  const auto discard = [&complete] { ::unlink(complete.c_str()); };
  try {
    write_file_durably(complete, record_text(/*held=*/true));
  } catch (...) {
    discard();
    throw;
  }
  const std::int64_t linked =
      retried("link", path, [&] { return ::link(complete.c_str(), path.c_str()); });
  const int reason = errno;
  discard();
  if (linked < 0 && (reason == EEXIST || reason == ENOENT)) return false;
  if (linked < 0 && (reason == EPERM || reason == EOPNOTSUPP || reason == ENOSYS)) {
    fail(ExitCode::kStorage,
         "link of '{}' failed: {}: its file system has no hard links, which the lease of a run "
         "folder needs: choose a --run on another file system",
         path, std::strerror(reason));
  }
  errno = reason;
  check_call(linked, "link", path);
  sync_directory(parent_path(path));
  return true;
}

}  // namespace

Lease::Lease(fs::path folder, std::string what, LeaseTimes times,
             const std::function<void(const std::string&)>& on_wait)
    : folder_(std::move(folder)), what_(std::move(what)), times_(times) {
  for (bool created = false; !created;) {
    const std::optional<Record> holder = newest_holder(folder_);
    const bool may_live = holder && holder->held && !has_ended(*holder);
    if (may_live && on_wait) on_wait(holder->holder);
    if (may_live && !expires(folder_, *holder, times_)) {
      fail(ExitCode::kUsage, "{} is in use by {} (lease '{}'): wait for it or stop it", what_,
           holder->holder, file_of(folder_, holder->number));
    }
    number_ = holder ? holder->number + 1 : 1;
    created = create_record(file());
  }
  renewed_ = Clock::now();
  remove_earlier(folder_, number_);
  thread_ = std::thread([this] { keep_renewing(); });
}

Lease::~Lease() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wakes_.notify_one();
  thread_.join();
  // Not removed: the next number must be higher. If this fails, other processes wait for the lease
  // to end.
  const std::string complete = temporary_name(file());
  const std::string text = record_text(/*held=*/false);
  UniqueHandle<FileDescriptorTraits> fd(
      ::open(complete.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  const bool is_complete = fd.get() >= 0 &&
                           ::write(fd.get(), text.data(), text.size()) == std::ssize(text) &&
                           ::fsync(fd.get()) == 0;
  fd.reset();
  if (!is_complete || is_next() || ::rename(complete.c_str(), file().c_str()) != 0) {
    ::unlink(complete.c_str());
  }
}

// Errors count as no.
bool Lease::is_next() const { return ::access(file_of(folder_, number_ + 1).c_str(), F_OK) == 0; }

std::string Lease::file() const { return file_of(folder_, number_); }

bool Lease::is_taken() const {
  return path_exists(file_of(folder_, number_ + 1)) || !path_exists(file());
}

void Lease::check() const {
  if (!is_taken()) return;
  const std::optional<Record> holder = newest_holder(folder_);
  throw FolderLost(fmt::format(
      "{} was taken by {}, because this job had not answered for {} s: it ends here and "
      "writes nothing more",
      what_, holder ? holder->holder : "another process",
      std::chrono::duration_cast<std::chrono::seconds>(times_.expires).count()));
}

void Lease::require_held() const {
  if (Clock::now() - renewed_.load() > times_.expires / 2) check();
}

// If a call fails, the lease is not renewed now; the next call may succeed.
void Lease::renew() {
  const auto now = Clock::now();
  if (!is_next() && ::utimensat(AT_FDCWD, file().c_str(), nullptr, 0) == 0 && !is_next()) {
    renewed_ = now;
  }
}

void Lease::keep_renewing() {
  std::unique_lock lock(mutex_);
  while (!wakes_.wait_for(lock, times_.renew, [this] { return stop_; })) {
    lock.unlock();
    renew();
    lock.lock();
  }
}

std::int64_t Lease::newest_number(const fs::path& folder) {
  if (!path_exists(folder.string())) return 0;
  const auto holders = holders_in(folder);
  return holders.empty() ? 0 : holders.rbegin()->first;
}

std::optional<std::string> Lease::holder(const fs::path& folder, LeaseTimes times) {
  if (!path_exists(folder.string())) return std::nullopt;
  const std::optional<Record> record = newest_holder(folder);
  if (!record || !record->held || has_ended(*record)) return std::nullopt;
  const auto touched = last_touch(file_of(folder, record->number));
  if (!touched) return std::nullopt;
  const auto age =
      std::chrono::system_clock::now().time_since_epoch() - std::chrono::seconds(touched->first);
  return std::chrono::abs(age) < times.expires ? std::optional(record->holder) : std::nullopt;
}

bool Lease::outlived_by_lock(const fs::path& folder, LeaseTimes times) {
  const std::optional<Record> holder = newest_holder(folder);
  return holder && holder->held && !holder->host.empty() && holder->host != host_name() &&
         expires(folder, *holder, times);
}

}  // namespace birkhoff
