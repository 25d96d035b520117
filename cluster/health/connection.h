// TCP between the ranks of a job, for the heartbeat: fixed-size packets over sockets that never
// block.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/files/file.h"

namespace birkhoff {

using Socket = UniqueHandle<FileDescriptorTraits>;

// A connected socket that sends and receives packets. Packet is plain data, sent as its bytes in
// memory.
template <typename Packet>
class Connection {
 public:
  explicit Connection(Socket socket) : socket_(std::move(socket)) {
    const int on = 1;
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  int fd() const { return socket_.get(); }
  bool open() const { return open_; }

  // If the packet does not fit into the socket's buffer, the peer is not reading: the packet is
  // dropped, and the peer will notice the silence.
  void send(const Packet& packet) {
    const ssize_t sent = ::send(socket_.get(), &packet, sizeof packet, MSG_NOSIGNAL | MSG_DONTWAIT);
    const bool partly = sent >= 0 && sent < static_cast<ssize_t>(sizeof packet);
    if (partly || (sent < 0 && errno != EAGAIN && errno != EINTR)) open_ = false;
  }

  // Reads the bytes that have arrived and calls `handle` for each whole packet. At the end of the
  // stream open() becomes false.
  template <typename Handle>
  void receive(Handle handle) {
    for (;;) {
      char* into = reinterpret_cast<char*>(&incoming_) + num_received_;
      const ssize_t received =
          ::recv(socket_.get(), into, sizeof incoming_ - num_received_, MSG_DONTWAIT);
      if (received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR)) open_ = false;
      if (received <= 0) return;
      num_received_ += static_cast<std::size_t>(received);
      if (num_received_ == sizeof incoming_) {
        num_received_ = 0;
        handle(incoming_);
      }
    }
  }

  void end_sending() { ::shutdown(socket_.get(), SHUT_WR); }

 private:
  Socket socket_;
  bool open_ = true;
  Packet incoming_;
  std::size_t num_received_ = 0;
};

// Waits until one of the descriptors is readable, but at most `ms` milliseconds.
void wait_readable(const std::vector<int>& descriptors, int ms);

// Listens on a free port of all interfaces and sets `port`. Returns an empty Socket on failure.
Socket listen_anywhere(std::uint16_t& port);

// Numeric addresses of this machine: first those that other machines may reach, then loopback.
std::vector<std::string> own_addresses();

// Connects within `ms` milliseconds. Returns an empty Socket on failure.
Socket connect_to(const std::string& address, const std::string& port, int ms);

}  // namespace birkhoff
