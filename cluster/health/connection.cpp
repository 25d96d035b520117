#include "cluster/health/connection.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <poll.h>

#include <cstring>

namespace birkhoff {

void wait_readable(const std::vector<int>& descriptors, int ms) {
  std::vector<pollfd> polled;
  for (const int fd : descriptors) polled.push_back({fd, POLLIN, 0});
  ::poll(polled.data(), polled.size(), ms);
}

Socket listen_anywhere(std::uint16_t& port) {
  for (const int family : {AF_INET6, AF_INET}) {
    Socket listener(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!listener) continue;
    sockaddr_storage address = {};
    address.ss_family = static_cast<sa_family_t>(family);  // any interface, any port
    const int off = 0;
    if (family == AF_INET6) {
      ::setsockopt(listener.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener.get(), generic, length) != 0 || ::listen(listener.get(), 1024) != 0 ||
        ::getsockname(listener.get(), generic, &length) != 0) {
      continue;
    }
    port = ntohs(family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                    : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
    return listener;
  }
  return Socket();
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> outside, loopback;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char name[NI_MAXHOST];
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::getnameinfo(entry->ifa_addr, length, name, sizeof name, nullptr, 0, NI_NUMERICHOST) !=
        0) {
      continue;
    }
    if (std::strchr(name, '%') != nullptr) continue;  // link-local: useless elsewhere
    ((entry->ifa_flags & IFF_LOOPBACK) != 0 ? loopback : outside).emplace_back(name);
  }
  ::freeifaddrs(list);
  outside.insert(outside.end(), loopback.begin(), loopback.end());
  return outside;
}

Socket connect_to(const std::string& address, const std::string& port, int ms) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0) return Socket();
  Socket socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  bool connected = socket && ::connect(socket.get(), found->ai_addr, found->ai_addrlen) == 0;
  ::freeaddrinfo(found);
  if (!connected && socket && errno == EINPROGRESS) {
    pollfd polled = {socket.get(), POLLOUT, 0};
    int error = 0;
    socklen_t length = sizeof error;
    connected = ::poll(&polled, 1, ms) == 1 &&
                ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 &&
                error == 0;
  }
  return connected ? std::move(socket) : Socket();
}

}  // namespace birkhoff
