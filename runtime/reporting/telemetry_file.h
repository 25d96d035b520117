// A file about a run that training does not need: metrics, events. A failed write never ends a run:
// the records wait in memory and are tried again with each later record.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cluster/base/files/file.h"

namespace birkhoff {

// Gets one line when a file can no longer be written, and when it can be written again.
using TelemetryWarning = std::function<void(const std::string&)>;

class TelemetryFile {
 public:
  // Waiting records take at most this many bytes; further ones are lost, and counted.
  static constexpr std::size_t kMaxWaitingBytes = 16 << 20;

  // Takes over a file that only this object appends to. Error(kStorage).
  TelemetryFile(File file, TelemetryWarning warn);
  // Appends a whole record. File-system errors do not throw.
  void append(std::string_view record);
  // Size of the file once all waiting records are in it.
  std::int64_t num_bytes() const {
    return written_bytes_ + static_cast<std::int64_t>(waiting_.size());
  }
  // Tries a last time, and warns of missing records. Must be called at the end.
  void close();

 private:
  void flush();

  File file_;
  const TelemetryWarning warn_;
  std::int64_t written_bytes_;
  std::string waiting_;
  bool failing_ = false;
  std::int64_t num_lost_ = 0;  // records, since writing failed
};

}  // namespace birkhoff
