#include "runtime/reporting/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <chrono>
#include <cstring>
#include <utility>

#include "cluster/base/files/checksum.h"

namespace birkhoff {
namespace {

// Protobuf's wire format: tag = field number * 8 + type.
enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

template <typename T>
void append_little_endian(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little);
  std::array<char, sizeof(T)> bytes;
  std::memcpy(bytes.data(), &value, sizeof(T));
  out.append(bytes.data(), bytes.size());
}

void append_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void append_tag(std::string& out, int field, WireType type) {
  append_varint(out, static_cast<std::uint64_t>(field) << 3 | type);
}

void append_bytes(std::string& out, int field, std::string_view bytes) {
  append_tag(out, field, kBytes);
  append_varint(out, bytes.size());
  out.append(bytes);
}

// Fields wall_time = 1 and, for all but the version event, step = 2 of Event.
std::string event(double wall_time, std::int64_t step = 0) {
  std::string out;
  append_tag(out, 1, kFixed64);
  append_little_endian(out, wall_time);
  if (step > 0) {
    append_tag(out, 2, kVarint);
    append_varint(out, static_cast<std::uint64_t>(step));
  }
  return out;
}

std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes.data(), bytes.size());
  return std::rotr(crc, 15) + 0xa282ead8u;
}

double wall_time_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Creates a file with the events that every file begins with. An error here ends the run's start.
File start_event_file(const std::string& path, std::int64_t first_step) {
  File file = File::create(path);
  const double now = wall_time_now();
  file.write_all(event_record(version_event(now)));
  file.write_all(event_record(start_event(now, first_step)));
  return file;
}

// TensorBoard wants "tfevents" in the name, and orders files by the time in it: a new file is later
// than all existing ones, even if this machine's clock is behind.
std::string new_event_path(const std::filesystem::path& folder) {
  constexpr std::string_view kPrefix = "events.out.tfevents.";
  auto seconds = static_cast<std::int64_t>(wall_time_now());
  for (const std::string& name : list_directory(folder.string())) {
    if (!name.starts_with(kPrefix)) continue;
    std::int64_t other = 0;
    std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), other);
    seconds = std::max(seconds, other + 1);
  }
  return (folder / fmt::format("{}{:010d}.{}.{}.0", kPrefix, seconds, host_name(), getpid()))
      .string();
}

}  // namespace

std::string version_event(double wall_time) {
  std::string out = event(wall_time);
  append_bytes(out, 3, "brain.Event:2");
  return out;
}

std::string start_event(double wall_time, std::int64_t step) {
  std::string session_log;
  append_tag(session_log, 1, kVarint);
  append_varint(session_log, 1);  // SessionLog.status = START
  std::string out = event(wall_time, step);
  append_bytes(out, 7, session_log);
  return out;
}

std::string scalar_event(double wall_time, std::int64_t step, std::string_view tag, float value) {
  std::string summary_value;
  append_bytes(summary_value, 1, tag);
  append_tag(summary_value, 2, kFixed32);
  append_little_endian(summary_value, value);
  std::string summary;
  append_bytes(summary, 1, summary_value);
  std::string out = event(wall_time, step);
  append_bytes(out, 5, summary);
  return out;
}

std::string event_record(std::string_view event) {
  std::string out;
  append_little_endian(out, static_cast<std::uint64_t>(event.size()));
  append_little_endian(out, masked_crc(out));
  out.append(event);
  append_little_endian(out, masked_crc(event));
  return out;
}

EventWriter::EventWriter(const std::filesystem::path& folder, std::int64_t first_step,
                         TelemetryWarning warn)
    : file_(start_event_file(new_event_path(folder), first_step), std::move(warn)) {}

void EventWriter::scalar(std::string_view tag, std::int64_t step, double value) {
  file_.append(event_record(scalar_event(wall_time_now(), step, tag, static_cast<float>(value))));
}

void EventWriter::close() { file_.close(); }

}  // namespace birkhoff
