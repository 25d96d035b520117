// The right to write in a folder that machines share, for file systems whose flock means nothing,
// or keeps the lock of a machine that is gone.
//
// FOLDER/holder-N names the N-th holder; N is the fencing number. Only one process can create
// holder-(N+1), and it has the folder from then on. The holder touches its file every two seconds.
// Another process may take the folder once it has seen the file unchanged for ten seconds by its
// own clock, so clocks need not agree. It may take it at once if the holder gave it back or was a
// process of this machine that has ended.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "cluster/base/error.h"

namespace birkhoff {

inline constexpr std::string_view kHolderPrefix = "holder-";

// Another process has taken the folder: nothing may be written there any more.
class FolderLost : public Error {
 public:
  explicit FolderLost(const std::string& what) : Error(ExitCode::kUsage, what) {}
};

struct LeaseTimes {
  std::chrono::milliseconds renew{2'000}, expires{10'000};
};

class Lease {
 public:
  // Takes the folder; waits until a holder that may be gone has not renewed its lease for
  // times.expires; calls on_wait, unless it is empty, with that holder before it waits. what: the
  // folder's name in messages. Error(kUsage) if another process holds it.
  Lease(std::filesystem::path folder, std::string what, LeaseTimes times = {},
        const std::function<void(const std::string& holder)>& on_wait = {});
  // Gives the folder back.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  std::int64_t number() const { return number_; }

  // FolderLost if another process has taken the folder. Reads the file system only if the lease was
  // not renewed lately.
  void require_held() const;
  // The same, but always reads the file system. Call it before an action that must not happen
  // twice.
  void check() const;

  // The fencing number of the folder's newest holder; 0: it never had one.
  static std::int64_t newest_number(const std::filesystem::path& folder);

  // The folder's holder according to its record: it has renewed its lease lately, and is no ended
  // process of this machine. Assumes that the machines' clocks agree.
  static std::optional<std::string> holder(const std::filesystem::path& folder,
                                           LeaseTimes times = {});

  // Waits until the holder's lease expires or is renewed. Returns true if it expires and the holder
  // is of another machine: the machine may be gone, and its flock with it.
  static bool outlived_by_lock(const std::filesystem::path& folder, LeaseTimes times = {});

 private:
  std::string file() const;
  bool is_taken() const;
  bool is_next() const;  // whether there is a later holder
  void renew();
  void keep_renewing();

  const std::filesystem::path folder_;
  const std::string what_;
  const LeaseTimes times_;
  std::int64_t number_ = 0;
  std::atomic<std::chrono::steady_clock::time_point> renewed_{};
  std::mutex mutex_;
  std::condition_variable wakes_;
  bool stop_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace birkhoff
