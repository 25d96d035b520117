#include "pipe_ends.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

namespace birkhoff {
namespace {

constexpr int kMaxMilliseconds = 120'000;

// The next bytes of a descriptor; empty at the end, or if none come.
std::string read_available(int descriptor) {
  pollfd waiting{descriptor, POLLIN, 0};
  if (poll(&waiting, 1, kMaxMilliseconds) <= 0) return "";
  std::string bytes(4096, '\0');
  const ssize_t got = read(descriptor, bytes.data(), bytes.size());
  bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return bytes;
}

}  // namespace

bool wait_until(const std::function<bool()>& condition) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(kMaxMilliseconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

NamedPipe::NamedPipe(std::string path) : path_(std::move(path)) {
  if (mkfifo(path_.c_str(), 0600) != 0) throw std::runtime_error("mkfifo " + path_);
}

NamedPipe::~NamedPipe() {
  close();
  unlink(path_.c_str());
}

void NamedPipe::open_for_read() { descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC); }

void NamedPipe::open_for_write() { descriptor_ = open(path_.c_str(), O_WRONLY | O_CLOEXEC); }

std::string NamedPipe::read_some() const { return read_available(descriptor_); }

void NamedPipe::write_all(const std::string& bytes) const {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t put = write(descriptor_, bytes.data() + done, bytes.size() - done);
    if (put < 0) throw std::runtime_error("write to " + path_);
    done += static_cast<std::size_t>(put);
  }
}

bool NamedPipe::is_empty() const {
  int num_waiting = 0;
  return ioctl(descriptor_, FIONREAD, &num_waiting) == 0 && num_waiting == 0;
}

void NamedPipe::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Terminal::Terminal() : descriptor_(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) {
  if (descriptor_ < 0 || grantpt(descriptor_) != 0 || unlockpt(descriptor_) != 0)
    throw std::runtime_error("no terminal");
  path_ = ptsname(descriptor_);
}

Terminal::~Terminal() { close(descriptor_); }

std::string Terminal::read_all() const {
  std::string all;
  for (;;) {
    const std::string part = read_available(descriptor_);  // EIO once no process has it open
    if (part.empty()) return all;
    all += part;
  }
}

}  // namespace birkhoff
