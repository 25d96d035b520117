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
using Token = std::array<std::uint64_t, 2>;  // of the job: other packets are ignored

constexpr double kInterval = 0.25;  // seconds between two statuses of a rank
constexpr int kPollMs = 100;        // longest wait for packets
constexpr double kLongestNap = 2;   // a thread that slept longer was stopped itself
constexpr int kConnectMs = 2000;    // per address of rank 0
constexpr int kGoodbyeMs = 1000;

double seconds_now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

struct Packet {
  Token token = {};
  RankStatus status;
};

using PeerConnection = Connection<Packet>;

}  // namespace

RankStatus make_status(const World& world, const Activity& activity,
                       const std::vector<const ProcessGroup*>& groups) {
  RankStatus status{activity.snapshot()};
  status.rank = world.rank();
  status.set_host(world.host());
  status.progress = status.ticks;
  for (const ProcessGroup* group : groups) {
    status.progress += group->ring().total_operations();
    const OperationRing::Entry operation = group->ring().current();
    if (operation.sequence < 0 || (status.waiting != 0 && !operation.waiting)) continue;
    status.operation_number = operation.sequence;
    status.waiting = operation.waiting ? 1 : 0;
    status.set_operation(operation.operation + " '" + operation.name + "'");
  }
  return status;
}

class Heartbeat::Impl {
 public:
  Impl(ProcessGroup& world, const WatchdogLimits& limits, std::function<RankStatus()> status,
       std::function<void(const Diagnosis&)> alarm,
       std::function<void(const SlowRank&)> on_slow_rank)
      : rank_(world.rank()),
        sign_(std::move(status)),
        alarm_(std::move(alarm)),
        on_slow_rank_(std::move(on_slow_rank)),
        watchdog_(world.size(), limits),
        slow_ranks_(world.size()) {
    // Rank 0 broadcasts "token token port address address ...".
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
  // Rank 0: receives the statuses of all ranks, replies to each, and diagnoses.
  void watch() {
    std::vector<Peer> peers;
    double last_look = seconds_now();
    bool alarmed = false;
    while (!stopping_) {
      std::vector<int> descriptors = {listener_.get()};
      for (const Peer& peer : peers) descriptors.push_back(peer.connection.fd());
      wait_readable(descriptors, kPollMs);
      const double now = seconds_now();
      if (now - last_look > kLongestNap) watchdog_.reset(now);
      last_look = now;
      while (Socket accepted{
          listener_ ? ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)
                    : -1}) {
        peers.push_back({PeerConnection(std::move(accepted)), -1});
      }
      for (Peer& peer : peers) hear(peer, now);
      std::erase_if(peers, [](const Peer& peer) { return !peer.connection.open(); });
      const RankStatus mine = packet().status;
      watchdog_.on_heartbeat(mine, now);
      slow_ranks_.on_heartbeat(mine);
      for (const SlowRank& slow : slow_ranks_.find(now)) {
        log_warning("step {}: {}; see \"Slow ranks\" in docs/runbook.md", slow.step, slow.text());
        if (on_slow_rank_) on_slow_rank_(slow);
      }
      if (alarmed || !judge(now)) continue;
      alarmed = true;
      alarm_(*watchdog_.diagnosis(now));
    }
    for (Peer& peer : peers) {
      peer.connection.send(goodbye());
      peer.connection.end_sending();
    }
    // The goodbye would be lost if a socket were closed before its peer has read it.
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
      const bool ours = packet.token == token_ && packet.status.rank > 0;
      if (!ours) return;
      peer.rank = packet.status.rank;
      watchdog_.on_heartbeat(packet.status, now);
      slow_ranks_.on_heartbeat(packet.status);
      peer.connection.send(this->packet());
    });
    if (!peer.connection.open() && peer.rank >= 0) watchdog_.on_disconnect(peer.rank, now);
  }

  // True if the job should end.
  bool judge(double now) {
    for (const std::string& line : watchdog_.warnings(now)) log_warning("{}", line);
    return watchdog_.diagnosis(now).has_value();
  }

  // Other ranks: report to rank 0, and watch it.
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
    watchdog_.on_heartbeat(answer_, last_look);
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
      if (now - last_look > kLongestNap) watchdog_.reset(now);
      last_look = now;
      connection->receive([&](const Packet& packet) {
        // Rank 0 watches its own progress. Here only its replies count as progress.
        answer_ = packet.status;
        ++num_answers_;
        answer_.progress = num_answers_;
        watchdog_.on_heartbeat(answer_, now);
      });
      if (!connection->open()) watchdog_.on_disconnect(0, now);
      watchdog_.on_heartbeat(packet().status, now);
      if (alarmed || !judge(now)) continue;
      alarmed = true;
      // One survivor is enough to end the job; later ranks may be ended before their turn.
      std::this_thread::sleep_for(std::chrono::milliseconds(50 * (rank_ - 1)));
      if (!stopping_) alarm_(*watchdog_.diagnosis(now));
    }
    connection->send(goodbye());
    connection->end_sending();
    const double deadline = seconds_now() + kGoodbyeMs / 1000.0;
    while (connection->open() && seconds_now() < deadline) {
      wait_readable({connection->fd()}, kPollMs);
      connection->receive([](const Packet&) {});
    }
  }

  // Connects to the first address at which rank 0 replies with the job's token.
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
          answer_ = packet.status;
        });
      }
      if (answered) return connection;
    }
    return std::nullopt;
  }

  Packet packet() const {
    Packet packet;
    packet.token = token_;
    packet.status = sign_();
    packet.status.rank = rank_;
    return packet;
  }
  Packet goodbye() const {
    Packet last = packet();
    last.status.phase = Phase::kEnd;
    return last;
  }

  const int rank_;
  const std::function<RankStatus()> sign_;
  const std::function<void(const Diagnosis&)> alarm_;
  const std::function<void(const SlowRank&)> on_slow_rank_;
  Watchdog watchdog_;
  SlowRanks slow_ranks_;  // rank 0's
  Token token_ = {};
  std::uint16_t port_ = 0;
  std::vector<std::string> addresses_;
  Socket listener_;
  RankStatus answer_;  // rank 0's last reply
  std::int64_t num_answers_ = 0;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

Heartbeat::Heartbeat(ProcessGroup& world, const WatchdogLimits& limits,
                     std::function<RankStatus()> status,
                     std::function<void(const Diagnosis&)> alarm,
                     std::function<void(const SlowRank&)> on_slow_rank) {
  if (limits.seconds > 0) {
    impl_ = std::make_unique<Impl>(world, limits, std::move(status), std::move(alarm),
                                   std::move(on_slow_rank));
  }
}

Heartbeat::~Heartbeat() = default;

}  // namespace birkhoff
