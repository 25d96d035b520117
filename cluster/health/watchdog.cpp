#include "cluster/health/watchdog.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <type_traits>
#include <utility>

namespace birkhoff {
namespace {

static_assert(std::is_trivially_copyable_v<Sign>);

constexpr const char* kCure =
    "; run the same command again to resume, without that machine if it comes again";

// Cut to the room there is; the last byte stays 0.
template <std::size_t N>
void copy_text(std::array<char, N>& to, std::string_view text) {
  to.fill('\0');
  std::copy_n(text.begin(), std::min(text.size(), N - 1), to.begin());
}

std::string describe_place(const Sign& sign) {
  switch (sign.phase) {
    case Phase::kStart:
      return sign.step == 0 ? "before the first step"
                            : fmt::format("resuming at step {}", sign.step);
    case Phase::kStep:
      return fmt::format("in step {}", sign.step);
    case Phase::kEvaluate:
      return fmt::format("in the evaluation after step {}", sign.step);
    case Phase::kSave:
      return fmt::format("in the save after step {}", sign.step);
    case Phase::kEnd:
      return "at the end";
  }
  return "";
}

std::string describe_operation(const Sign& sign) {
  if (sign.operation_number < 0) return "before any operation";
  return fmt::format("{} {} (operation {})", sign.waiting != 0 ? "waiting in" : "after",
                     sign.operation.data(), sign.operation_number);
}

std::string describe_rank(int rank, const Sign& sign) {
  return fmt::format("rank {} on {}", rank, sign.host.data());
}

std::string named_ranks(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

void Sign::set_host(std::string_view text) { copy_text(host, text); }
void Sign::set_operation(std::string_view text) { copy_text(operation, text); }

Watchdog::Watchdog(int num_ranks, WatchdogLimits limits)
    : limits_(limits), ranks_(static_cast<std::size_t>(num_ranks)) {}

void Watchdog::hear(const Sign& sign, double now) {
  require(sign.rank >= 0 && sign.rank < static_cast<int>(ranks_.size()), "a rank of the world");
  Rank& rank = ranks_[static_cast<std::size_t>(sign.rank)];
  if (!rank.sign || rank.sign->progress != sign.progress || rank.sign->phase != sign.phase) {
    rank.progressed = now;
  }
  rank.sign = sign;
  rank.heard = now;
}

void Watchdog::lose(int rank, double now) {
  Rank& lost = ranks_[static_cast<std::size_t>(rank)];
  if (lost.lost || !is_missed(lost)) return;
  lost.lost = true;
  lost.heard = now;
}

std::vector<std::string> Watchdog::news(double now) {
  std::vector<std::string> lines;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    if (!rank.lost || rank.told || now - rank.heard < kNewsDelay) continue;
    rank.told = true;
    lines.push_back(last_seen(static_cast<int>(r)) + ": ended without a word");
  }
  return lines;
}

void Watchdog::forgive(double now) {
  for (Rank& rank : ranks_) rank.heard = rank.progressed = now;
}

double Watchdog::limit(const Sign& sign) const {
  if (sign.usual_seconds <= 0) return limits_.patient_seconds;
  return std::max(limits_.seconds, limits_.steps * sign.usual_seconds);
}

// Who has not been heard yet cannot be told from one that a firewall hides; who has said goodbye is
// not missed.
bool Watchdog::is_missed(const Rank& rank) const {
  return rank.sign && rank.sign->phase != Phase::kEnd;
}

std::optional<Verdict> Watchdog::verdict(double now) const {
  double shortest_idle = -1, longest_limit = 0;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    if (!is_missed(rank)) continue;
    const double silence = now - rank.heard;
    if (rank.lost) {
      if (silence < kLossGrace) continue;
      return Verdict{ExitCode::kPeer, fmt::format("{}: ended without a word{}",
                                                  last_seen(static_cast<int>(r)), kCure)};
    }
    if (silence > std::max(limits_.seconds, limits_.steps * rank.sign->usual_seconds)) {
      return Verdict{ExitCode::kHang,
                     fmt::format("{}: silent for {:.1f} s; its process is stopped, or its machine "
                                 "or network is gone{}",
                                 last_seen(static_cast<int>(r)), silence, kCure)};
    }
    const double idle = now - rank.progressed;
    shortest_idle = shortest_idle < 0 ? idle : std::min(shortest_idle, idle);
    longest_limit = std::max(longest_limit, limit(*rank.sign));
  }
  // Nobody moves: the job moves again as soon as anybody does, so the most patient limit counts.
  if (shortest_idle > longest_limit) return Verdict{ExitCode::kHang, stall(now)};
  return std::nullopt;
}

Watchdog::Wait Watchdog::most_wait(int except) const {
  std::map<std::pair<std::int64_t, std::string>, std::vector<int>> waits;  // by step and place
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    if (!is_missed(rank) || rank.sign->waiting == 0 || static_cast<int>(r) == except) continue;
    const std::string place = describe_place(*rank.sign) + ", " + describe_operation(*rank.sign);
    waits[{rank.sign->step, place}].push_back(static_cast<int>(r));
  }
  Wait most;
  for (const auto& [step_and_place, ranks] : waits) {
    if (ranks.size() >= most.ranks.size()) most = {step_and_place.second, ranks};
  }
  return most;
}

// A sign is up to a quarter of a second old; where the others wait is where the rank is missed.
std::string Watchdog::last_seen(int rank) const {
  const Sign& sign = *ranks_[static_cast<std::size_t>(rank)].sign;
  const Wait wait = most_wait(rank);
  std::string text = describe_rank(rank, sign);
  if (!wait.ranks.empty()) {
    text += fmt::format(", missed by {} {}", named_ranks(wait.ranks), wait.place);
  }
  return text + fmt::format(", last heard {}, {}", describe_place(sign), describe_operation(sign));
}

// Who waits in the operation that most wait in is a victim; the others are to blame.
std::string Watchdog::stall(double now) const {
  const Wait wait = most_wait();
  std::vector<std::string> blamed;
  double since = now;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    if (!is_missed(rank)) continue;
    since = std::min(since, rank.progressed);
    if (std::ranges::find(wait.ranks, static_cast<int>(r)) == wait.ranks.end()) {
      blamed.push_back(fmt::format("{}, {}, {}", describe_rank(static_cast<int>(r), *rank.sign),
                                   describe_place(*rank.sign), describe_operation(*rank.sign)));
    }
  }
  std::string text = fmt::format("no progress for {:.1f} s: ", now - since);
  if (blamed.empty()) {
    text += fmt::format("all ranks are {}: the network does not deliver", wait.place);
  } else {
    text += fmt::format("{}", fmt::join(blamed, "; "));
    if (!wait.ranks.empty()) {
      text += wait.ranks.size() == 1
                  ? fmt::format("; the other ({}) is {}", named_ranks(wait.ranks), wait.place)
                  : fmt::format("; the others ({}) are {}", named_ranks(wait.ranks), wait.place);
    }
  }
  return text + kCure;
}

}  // namespace birkhoff
