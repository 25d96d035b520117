#include "tests/crash/file_versions.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace birkhoff {
namespace {

constexpr std::int64_t kSector = 512;

// Bytes [from, to) of a write.
void apply(std::string& content, const ByteChange& change, std::int64_t from, std::int64_t to) {
  const auto end = static_cast<std::size_t>(change.offset + to);
  if (content.size() < end) content.resize(end, '\0');
  std::memcpy(content.data() + change.offset + from, change.bytes->data() + from,
              static_cast<std::size_t>(to - from));
}

void apply(std::string& content, const ByteChange& change) {
  if (change.bytes == nullptr) {
    content.resize(static_cast<std::size_t>(change.offset), '\0');
  } else {
    apply(content, change, 0, change.size());
  }
}

// Applies all changes, except the part of write number i that goes into the file's bytes [from,
// to). With `full_size` the file is as long as if that part had been written.
FileVersion torn_version(const IoTrace& trace, const Content& durable,
                         const std::vector<ByteChange>& changes, std::size_t i, std::int64_t from,
                         std::int64_t to, bool full_size) {
  std::string content = *durable;
  for (std::size_t k = 0; k < changes.size(); ++k) {
    if (k != i) {
      apply(content, changes[k]);
      continue;
    }
    const std::int64_t begin = changes[i].offset, end = begin + changes[i].size();
    if (from > begin) apply(content, changes[i], 0, from - begin);
    if (to < end) apply(content, changes[i], to - begin, end - begin);
    if (full_size && static_cast<std::int64_t>(content.size()) < end) {
      content.resize(static_cast<std::size_t>(end), '\0');
    }
  }
  return {std::make_shared<const std::string>(std::move(content)),
          fmt::format("bytes {} to {} of: {}; ", from, to, describe(trace, changes[i].event))};
}

}  // namespace

FileVersion file_version(const IoTrace& trace, const Content& durable,
                         const std::vector<ByteChange>& changes, const Kept& kept) {
  std::string content = *durable, lost;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    if (kept[i]) {
      apply(content, changes[i]);
    } else {
      lost += describe(trace, changes[i].event) + "; ";
    }
  }
  return {std::make_shared<const std::string>(std::move(content)), std::move(lost)};
}

std::vector<FileVersion> all_file_versions(const IoTrace& trace, const Content& durable,
                                           const std::vector<ByteChange>& changes) {
  const Kept all(changes.size(), true), none(changes.size(), false);
  std::vector<FileVersion> versions;
  const auto add = [&](const Kept& kept) {
    versions.push_back(file_version(trace, durable, changes, kept));
  };
  add(all);
  add(none);
  for (std::size_t i = 0; i < changes.size(); ++i) {
    Kept kept = all;
    kept[i] = false;
    add(kept);
    kept = none;
    kept[i] = true;
    add(kept);
    kept = all;
    std::fill(kept.begin() + static_cast<std::ptrdiff_t>(i), kept.end(), false);
    add(kept);
    if (changes[i].bytes == nullptr) continue;
    const auto add_torn = [&](std::int64_t from, std::int64_t to, bool full_size) {
      versions.push_back(torn_version(trace, durable, changes, i, from, to, full_size));
    };
    const std::int64_t begin = changes[i].offset, end = begin + changes[i].size();
    add_torn(begin, end, true);
    for (std::int64_t at = begin / kSector * kSector; at < end; at += kSector) {
      if (at > begin) add_torn(at, end, false);
      add_torn(std::max(at, begin), std::min(at + kSector, end), true);
    }
  }
  return versions;
}

}  // namespace birkhoff
