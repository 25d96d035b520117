#include "launcher/processes/restarts.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "cluster/base/error.h"

namespace birkhoff {

bool Restarts::may_pass(int code) {
  using enum ExitCode;
  // mpirun's own failures have the code kInternal, too.
  constexpr ExitCode kTemporary[] = {kInternal, kStorage, kPeer, kHang, kMemory};
  return std::ranges::find(kTemporary, static_cast<ExitCode>(code)) != std::end(kTemporary);
}

bool is_failure(int code) {
  return code != static_cast<int>(ExitCode::kOk) && code != static_cast<int>(ExitCode::kRequeue);
}

bool Restarts::again(int code, std::int64_t saved_step, std::string& why) {
  if (most_ == 0 || !is_failure(code)) return false;
  if (!may_pass(code)) {
    why = fmt::format("not started again: exit code {} would recur", code);
    return false;
  }
  in_a_row_ = saved_step > saved_step_ ? 1 : in_a_row_ + 1;
  saved_step_ = saved_step;
  if (in_a_row_ > most_) {
    why = fmt::format(
        "not started again: no new checkpoint since step {}, after {} "
        "restarts (--restarts {})",
        saved_step, most_, most_);
    return false;
  }
  why = fmt::format(
      "exit code {}: starting again from the checkpoint of step {} (restart {} of {} "
      "without a new checkpoint)",
      code, saved_step, in_a_row_, most_);
  return true;
}

}  // namespace birkhoff
