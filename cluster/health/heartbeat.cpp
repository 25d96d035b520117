#include "cluster/health/heartbeat.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/logging/log.h"
#include "cluster/health/connection.h"

namespace birkhoff {
namespace {

using Clock = std::chrono::steady_clock;
using Token = std::array<std::uint64_t, 2>;  // of one job: strangers on its port are not heard

constexpr double kInterval = 0.25;  // seconds between two signs of a rank
constexpr int kPollMs = 100;        // how often a thread looks up
constexpr double kLongestNap = 2;   // a thread that slept longer was itself stopped
constexpr int kConnectMs = 2000;    // for each address of rank 0
constexpr int kGoodbyeMs = 1000;

double seconds_now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

struct Packet {
  Token token = {};
  Sign sign;
};

using PeerConnection = Connection<Packet>;

}  // namespace

Sign make_sign(const World& world, const Activity& activity,
               const std::vector<const Group*>& groups) {
  const Activity::Snapshot now = activity.snapshot();
  Sign sign;
  sign.rank = world.rank();
  sign.set_host(world.host());
  sign.phase = now.phase;
  sign.step = now.step;
  sign.usual_seconds = now.usual_seconds;
  sign.progress = now.ticks;
  for (const Group* group : groups) {
    sign.progress += group->ring().total_operations();
    const OperationRing::Entry operation = group->ring().current();
    if (operation.sequence < 0 || (sign.waiting != 0 && !operation.waiting)) continue;
    sign.operation_number = operation.sequence;
    sign.waiting = operation.waiting ? 1 : 0;
    sign.set_operation(operation.operation + " '" + operation.name + "'");
  }
  return sign;
}

class Heartbeat::Impl {
 public:
  Impl(Group& world, const WatchdogLimits& limits, std::function<Sign()> sign,
       std::function<void(const Verdict&)> alarm)
      : rank_(world.rank()),
        sign_(std::move(sign)),
        alarm_(std::move(alarm)),
        watchdog_(world.size(), limits) {
    // "token token port address address ...", from rank 0.
    std::ostringstream offer;
    if (rank_ == 0) {
      std::uint16_t port = 0;
      listener_ = listen_anywhere(port);
      if (::getrandom(token_.data(), sizeof token_, 0) < 0) token_ = {};
      offer << token_[0] << ' ' << token_[1] << ' ' << port;
      for (const std::string& address : own_addresses()) offer << ' ' << address;
    }
    std::istringstream answer(world.broadcast_bytes(offer.str(), 0, "heartbeat's address"));
    answer >> token_[0] >> token_[1] >> port_;
    for (std::string address; answer >> address;) addresses_.push_back(address);
    thread_ = std::thread([this] { rank_ == 0 ? watch() : report(); });
  }

  ~Impl() {
    stopping_ = true;
    thread_.join();
  }

 private:
  // Rank 0: hears all ranks, answers each, and judges.
  void watch() {
    std::vector<Peer> peers;
    double last_look = seconds_now();
    bool alarmed = false;
    while (!stopping_) {
      std::vector<int> descriptors = {listener_.get()};
      for (const Peer& peer : peers) descriptors.push_back(peer.connection.fd());
      wait_readable(descriptors, kPollMs);
      const double now = seconds_now();
      if (now - last_look > kLongestNap) watchdog_.forgive(now);
      last_look = now;
      while (Socket accepted{
          listener_ ? ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)
                    : -1}) {
        peers.push_back({PeerConnection(std::move(accepted)), -1});
      }
      for (Peer& peer : peers) hear(peer, now);
      std::erase_if(peers, [](const Peer& peer) { return !peer.connection.open(); });
      watchdog_.hear(packet().sign, now);
      if (alarmed || !judge(now)) continue;
      alarmed = true;
      alarm_(*watchdog_.verdict(now));
    }
    for (Peer& peer : peers) {
      peer.connection.send(goodbye());
      peer.connection.end_sending();
    }
    // A socket that is closed before the others have read would take the goodbye with it.
    const double deadline = seconds_now() + kGoodbyeMs / 1000.0;
    while (!peers.empty() && seconds_now() < deadline) {
      std::vector<int> descriptors;
      for (Peer& peer : peers) descriptors.push_back(peer.connection.fd());
      wait_readable(descriptors, kPollMs);
      for (Peer& peer : peers) peer.connection.receive([](const Packet&) {});
      std::erase_if(peers, [](const Peer& peer) { return !peer.connection.open(); });
    }
  }

  struct Peer {
    PeerConnection connection;
    int rank;  // -1 until its first packet
  };

  void hear(Peer& peer, double now) {
    peer.connection.receive([&](const Packet& packet) {
      const bool ours = packet.token == token_ && packet.sign.rank > 0;
      if (!ours) return;
      peer.rank = packet.sign.rank;
      watchdog_.hear(packet.sign, now);
      peer.connection.send(this->packet());
    });
    if (!peer.connection.open() && peer.rank >= 0) watchdog_.lose(peer.rank, now);
  }

  // True if the job should end.
  bool judge(double now) {
    for (const std::string& line : watchdog_.news(now)) log_warning("{}", line);
    return watchdog_.verdict(now).has_value();
  }

  // Other ranks: tell rank 0, and watch it.
  void report() {
    std::optional<PeerConnection> connection = connect();
    if (!connection) {
      if (!stopping_) {
        log_warning(
            "the watchdog cannot be reached: rank 0 does not answer on its port {}; this rank "
            "trains unwatched (watchdog.seconds: 0 turns the watchdog off)",
            port_);
      }
      return;
    }
    double last_sent = 0, last_look = seconds_now();
    watchdog_.hear(answer_, last_look);
    bool alarmed = false;
    while (!stopping_) {
      if (seconds_now() - last_sent >= kInterval && connection->open()) {
        last_sent = seconds_now();
        connection->send(packet());
      }
      if (connection->open()) {
        wait_readable({connection->fd()}, kPollMs);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs));
      }
      const double now = seconds_now();
      if (now - last_look > kLongestNap) watchdog_.forgive(now);
      last_look = now;
      connection->receive([&](const Packet& packet) {
        // Its progress is its own watchdog's business; that it answers is ours.
        answer_ = packet.sign;
        ++num_answers_;
        answer_.progress = num_answers_;
        watchdog_.hear(answer_, now);
      });
      if (!connection->open()) watchdog_.lose(0, now);
      watchdog_.hear(packet().sign, now);
      if (alarmed || !judge(now)) continue;
      alarmed = true;
      // One of the survivors is enough to end the job; who comes later may be ended before.
      std::this_thread::sleep_for(std::chrono::milliseconds(50 * (rank_ - 1)));
      if (!stopping_) alarm_(*watchdog_.verdict(now));
    }
    connection->send(goodbye());
    connection->end_sending();
    const double deadline = seconds_now() + kGoodbyeMs / 1000.0;
    while (connection->open() && seconds_now() < deadline) {
      wait_readable({connection->fd()}, kPollMs);
      connection->receive([](const Packet&) {});
    }
  }

  // The first address at which rank 0 answers with the job's token.
  std::optional<PeerConnection> connect() {
    for (const std::string& address : addresses_) {
      if (stopping_) return std::nullopt;
      Socket socket = connect_to(address, std::to_string(port_), kConnectMs);
      if (!socket) continue;
      PeerConnection connection(std::move(socket));
      connection.send(packet());
      bool answered = false;
      const double deadline = seconds_now() + kConnectMs / 1000.0;
      while (!answered && connection.open() && seconds_now() < deadline) {
        wait_readable({connection.fd()}, kPollMs);
        connection.receive([&](const Packet& packet) {
          answered = answered || packet.token == token_;
          answer_ = packet.sign;
        });
      }
      if (answered) return connection;
    }
    return std::nullopt;
  }

  Packet packet() const {
    Packet packet;
    packet.token = token_;
    packet.sign = sign_();
    packet.sign.rank = rank_;
    return packet;
  }
  Packet goodbye() const {
    Packet last = packet();
    last.sign.phase = Phase::kEnd;
    return last;
  }

  const int rank_;
  const std::function<Sign()> sign_;
  const std::function<void(const Verdict&)> alarm_;
  Watchdog watchdog_;
  Token token_ = {};
  std::uint16_t port_ = 0;
  std::vector<std::string> addresses_;
  Socket listener_;
  Sign answer_;  // rank 0's last
  std::int64_t num_answers_ = 0;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

Heartbeat::Heartbeat(Group& world, const WatchdogLimits& limits, std::function<Sign()> sign,
                     std::function<void(const Verdict&)> alarm) {
  if (limits.seconds > 0) {
    impl_ = std::make_unique<Impl>(world, limits, std::move(sign), std::move(alarm));
  }
}

Heartbeat::~Heartbeat() = default;

}  // namespace birkhoff
