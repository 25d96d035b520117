// What a file with bytes that were not synced may hold after a crash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/crash/io_trace.h"

namespace birkhoff {

// A write or truncation that was not synced.
struct ByteChange {
  std::size_t event = 0;
  std::int64_t offset = 0;             // a truncation: the new size
  const std::string* bytes = nullptr;  // of the trace; null: a truncation

  std::int64_t size() const { return static_cast<std::int64_t>(bytes->size()); }
};

// Whether each of some things that were not synced is kept.
using Kept = std::vector<bool>;

struct FileVersion {
  Content content;
  std::string lost;  // for messages, empty if nothing is
};

// `durable` with those of the changes, in their order.
FileVersion file_version(const IoTrace& trace, const Content& durable,
                         const std::vector<ByteChange>& changes, const Kept& kept);

// All is kept; nothing is; each change is lost alone, kept alone, and lost with all behind it; each
// write is torn at each sector, lacks each sector, and lacks all bytes but not their size.
std::vector<FileVersion> all_file_versions(const IoTrace& trace, const Content& durable,
                                           const std::vector<ByteChange>& changes);

}  // namespace birkhoff
