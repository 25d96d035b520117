#include "cluster/health/watchdog.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <type_traits>
#include <utility>

namespace birkhoff {
namespace {

static_assert(std::is_trivially_copyable_v<RankStatus>);

constexpr const char* kCure =
    "; run the same command again to resume; if it happens again, leave that machine out";

// Truncates the text to the array's size; the last byte stays 0.
template <std::size_t N>
void copy_text(std::array<char, N>& to, std::string_view text) {
  to.fill('\0');
  std::copy_n(text.begin(), std::min(text.size(), N - 1), to.begin());
}

std::string describe_place(const RankStatus& status) {
  switch (status.phase) {
    case Phase::kStart:
      return status.step == 0 ? "before the first step"
                              : fmt::format("resuming at step {}", status.step);
    case Phase::kStep:
      return fmt::format("in step {}", status.step);
    case Phase::kEvaluate:
      return fmt::format("in the evaluation after step {}", status.step);
    case Phase::kSave:
      return fmt::format("in the save after step {}", status.step);
    case Phase::kEnd:
      return "at the end";
  }
  return "";
}

std::string describe_operation(const RankStatus& status) {
  if (status.operation_number < 0) return "before any operation";
  return fmt::format("{} {} (operation {})", status.waiting != 0 ? "inside" : "after",
                     status.operation.data(), status.operation_number);
}

std::string describe_rank(const RankStatus& status) {
  return fmt::format("rank {} on {}", status.rank, status.host.data());
}

std::string named_ranks(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

void RankStatus::set_host(std::string_view text) { copy_text(host, text); }
void RankStatus::set_operation(std::string_view text) { copy_text(operation, text); }

Watchdog::Watchdog(int num_ranks, WatchdogLimits limits)
    : limits_(limits), ranks_(static_cast<std::size_t>(num_ranks)) {}

void Watchdog::on_heartbeat(const RankStatus& status, double now) {
  require(status.rank >= 0 && status.rank < static_cast<int>(ranks_.size()),
          "a status from a rank outside the world");
  Rank& rank = ranks_[static_cast<std::size_t>(status.rank)];
  if (!rank.status || rank.status->progress != status.progress ||
      rank.status->phase != status.phase) {
    rank.progressed = now;
  }
  rank.status = status;
  rank.heard = now;
}

void Watchdog::on_disconnect(int rank, double now) {
  Rank& lost = ranks_[static_cast<std::size_t>(rank)];
  if (lost.lost || !is_missed(lost)) return;
  lost.lost = true;
  lost.heard = now;
}

std::vector<std::string> Watchdog::warnings(double now) {
  std::vector<std::string> lines;
  for (Rank& rank : ranks_) {
    if (!rank.lost || rank.reported || now - rank.heard < kWarningDelay) continue;
    rank.reported = true;
    lines.push_back(loss(*rank.status));
  }
  return lines;
}

void Watchdog::reset(double now) {
  for (Rank& rank : ranks_) rank.heard = rank.progressed = now;
}

double Watchdog::limit(const RankStatus& status) const {
  if (status.usual_seconds <= 0) return limits_.patient_seconds;
  return std::max(limits_.seconds, limits_.steps * status.usual_seconds);
}

// A rank is missed only between its first status and its goodbye: one that never reports may be
// hidden by a firewall.
bool Watchdog::is_missed(const Rank& rank) const {
  return rank.status && rank.status->phase != Phase::kEnd;
}

std::optional<Diagnosis> Watchdog::diagnosis(double now) const {
  double shortest_idle = -1, longest_limit = 0;
  for (const Rank& rank : ranks_) {
    if (!is_missed(rank)) continue;
    const double silence = now - rank.heard;
    if (rank.lost) {
      if (silence < kLossGrace) continue;
      return Diagnosis{ExitCode::kPeer, loss(*rank.status) + kCure};
    }
    if (silence > std::max(limits_.seconds, limits_.steps * rank.status->usual_seconds)) {
      return Diagnosis{
          ExitCode::kHang,
          fmt::format("{} has been silent for {:.1f} s: its process is stopped, or its machine "
                      "or network is down{}{}",
                      describe_rank(*rank.status), silence, last_seen(*rank.status), kCure)};
    }
    const double idle = now - rank.progressed;
    shortest_idle = shortest_idle < 0 ? idle : std::min(shortest_idle, idle);
    longest_limit = std::max(longest_limit, limit(*rank.status));
  }
  // No rank makes progress. The job continues as soon as one rank does, so the longest limit
  // counts.
  if (shortest_idle > longest_limit) return Diagnosis{ExitCode::kHang, stall(now)};
  return std::nullopt;
}

Watchdog::Wait Watchdog::most_wait(int except) const {
  std::map<std::pair<std::int64_t, std::string>, std::vector<int>> waits;  // by step and operation
  for (const Rank& rank : ranks_) {
    if (!is_missed(rank) || rank.status->waiting == 0 || rank.status->rank == except) continue;
    const std::string place =
        describe_place(*rank.status) + ", " + describe_operation(*rank.status);
    waits[{rank.status->step, place}].push_back(rank.status->rank);
  }
  Wait most;
  for (const auto& [step_and_place, ranks] : waits) {
    if (ranks.size() >= most.ranks.size()) most = {step_and_place.second, ranks};
  }
  return most;
}

// The operation in which the other ranks wait for this rank, and its last status, which may be a
// quarter of a second old.
std::string Watchdog::last_seen(const RankStatus& status) const {
  const Wait wait = most_wait(status.rank);
  std::string text;
  if (!wait.ranks.empty()) {
    text += fmt::format("; {} {} for it {}", named_ranks(wait.ranks),
                        wait.ranks.size() == 1 ? "waits" : "wait", wait.place);
  }
  return text + fmt::format("; its last status: {}, {}", describe_place(status),
                            describe_operation(status));
}

std::string Watchdog::loss(const RankStatus& status) const {
  return fmt::format("{} exited without an error message{}", describe_rank(status),
                     last_seen(status));
}

// Ranks that wait are victims of those that do not. If all wait, those that wait in the operation
// that most ranks wait in are, and the rest are to blame.
std::string Watchdog::stall(double now) const {
  const Wait wait = most_wait();
  std::vector<std::string> blamed;
  double since = now;
  const bool all_wait = std::ranges::all_of(
      ranks_, [&](const Rank& rank) { return !is_missed(rank) || rank.status->waiting; });
  for (const Rank& rank : ranks_) {
    if (!is_missed(rank)) continue;
    since = std::min(since, rank.progressed);
    const bool waits_with_most =
        std::ranges::find(wait.ranks, rank.status->rank) != wait.ranks.end();
    if (all_wait ? !waits_with_most : !rank.status->waiting) {
      blamed.push_back(fmt::format("{}, {}, {}", describe_rank(*rank.status),
                                   describe_place(*rank.status), describe_operation(*rank.status)));
    }
  }
  std::string text = fmt::format("no progress for {:.1f} s: ", now - since);
  if (blamed.empty()) {
    text += fmt::format("all ranks wait {}: the network delivers no data", wait.place);
  } else {
    text += fmt::format("{}", fmt::join(blamed, "; "));
    if (!wait.ranks.empty()) {
      text += wait.ranks.size() == 1
                  ? fmt::format("; the other ({}) waits {}", named_ranks(wait.ranks), wait.place)
                  : fmt::format("; the others ({}) wait {}", named_ranks(wait.ranks), wait.place);
    }
  }
  return text + kCure;
}

}  // namespace birkhoff
