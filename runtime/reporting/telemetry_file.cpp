#include "runtime/reporting/telemetry_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"

namespace birkhoff {

TelemetryFile::TelemetryFile(File file, TelemetryWarning warn)
    : file_(std::move(file)), warn_(std::move(warn)), written_bytes_(file_.size()) {}

void TelemetryFile::append(std::string_view record) {
  if (waiting_.size() + record.size() > kMaxWaitingBytes) {
    ++num_lost_;
  } else {
    waiting_ += record;
  }
  flush();
}

void TelemetryFile::flush() {
  try {
    if (failing_) {
      // A network file system may have forgotten the old descriptor. Bytes that the failed write
      // left in the file, up to the middle of a record, are not written again.
      file_ = File::open_for_append(file_.path());
      const std::int64_t waiting_bytes = static_cast<std::int64_t>(waiting_.size());
      const std::int64_t left =
          std::clamp<std::int64_t>(file_.size() - written_bytes_, 0, waiting_bytes);
      waiting_.erase(0, static_cast<std::size_t>(left));
      written_bytes_ += left;
    }
    file_.write_all(waiting_);
    written_bytes_ = num_bytes();
    waiting_.clear();
    if (failing_) {
      warn_(fmt::format("{}: can be written again; {} lost", file_.path(),
                        counted(num_lost_, "record")));
    }
    failing_ = false;
    num_lost_ = 0;
  } catch (const Error& error) {
    if (!failing_) {
      warn_(fmt::format("{}; training continues, and the missing records follow once writing works",
                        error.what()));
    }
    failing_ = true;
  }
}

void TelemetryFile::close() {
  flush();
  if (failing_) {
    warn_(fmt::format("{}: its last {} could not be written, nor {} before that", file_.path(),
                      counted(waiting_.size(), "byte"), counted(num_lost_, "record")));
    return;
  }
  try {
    file_.close();
  } catch (const Error& error) {
    warn_(error.what());
  }
}

}  // namespace birkhoff
