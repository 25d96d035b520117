// A file that tells of a run and that training can do without: metrics, events. Writing it never
// ends a run: what cannot be written waits in memory, and is tried again with each later record.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cluster/base/files/file.h"

namespace birkhoff {

// What is to be said when a file stops being written and when it is written again; one line.
using TelemetryWarning = std::function<void(const std::string&)>;

class TelemetryFile {
 public:
  // Records waiting take at most this many bytes; further ones are lost, and counted.
  static constexpr std::size_t kMaxWaitingBytes = 16 << 20;

  // Takes over a file that only this object appends to. Error(kStorage).
  TelemetryFile(File file, TelemetryWarning warn);
  // Appends a whole record. Does not throw for the file system.
  void append(std::string_view record);
  // Size of the file once all that waits is in it.
  std::int64_t num_bytes() const {
    return written_bytes_ + static_cast<std::int64_t>(waiting_.size());
  }
  // Tries a last time; says what is missing then. Must be called at the end.
  void close();

 private:
  void flush();

  File file_;
  const TelemetryWarning warn_;
  std::int64_t written_bytes_;
  std::string waiting_;
  bool failing_ = false;
  std::int64_t num_lost_ = 0;  // records, since the writing failed
};

}  // namespace birkhoff
