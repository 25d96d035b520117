// The possible contents of a file with unsynced bytes after a crash.
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
  const std::string* bytes = nullptr;  // owned by the trace; null: a truncation

  std::int64_t size() const { return static_cast<std::int64_t>(bytes->size()); }
};

// One flag per unsynced change: whether it is kept.
using Kept = std::vector<bool>;

struct FileVersion {
  Content content;
  std::string lost;  // for messages; empty if nothing is lost
};

// `durable` with the kept changes applied in order.
FileVersion file_version(const IoTrace& trace, const Content& durable,
                         const std::vector<ByteChange>& changes, const Kept& kept);

// The versions with all changes; with none; without one change; with only one; and without one and
// all later ones. Also each write torn at each sector, without each sector, and with its size but
// without its bytes.
std::vector<FileVersion> all_file_versions(const IoTrace& trace, const Content& durable,
                                           const std::vector<ByteChange>& changes);

}  // namespace birkhoff
