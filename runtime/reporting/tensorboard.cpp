#include "runtime/reporting/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <utility>

#include "cluster/base/files/checksum.h"
#include "configs/schema/tensorboard_event.pb.h"
#include "runtime/reporting/run_history.h"

namespace birkhoff {
namespace {

using configs::TensorBoardEvent;

template <typename T>
void append_little_endian(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// All but the version event have a step.
TensorBoardEvent event_at(double wall_time, std::int64_t step = 0) {
  TensorBoardEvent event;
  event.set_wall_time(wall_time);
  if (step > 0) event.set_step(step);
  return event;
}

std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes.data(), bytes.size());
  return std::rotr(crc, 15) + 0xa282ead8u;
}

// Creates a file with the events that every file begins with. An error here ends the run's start.
File start_event_file(const std::string& path, std::int64_t first_step) {
  File file = File::create(path);
  const double now = unix_seconds();
  file.write_all(event_record(version_event(now)));
  file.write_all(event_record(start_event(now, first_step)));
  return file;
}

// TensorBoard wants "tfevents" in the name, and orders files by the time in it: a new file is later
// than all existing ones, even if this machine's clock is behind.
std::string new_event_path(const std::filesystem::path& folder) {
  constexpr std::string_view kPrefix = "events.out.tfevents.";
  auto seconds = static_cast<std::int64_t>(unix_seconds());
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
  TensorBoardEvent event = event_at(wall_time);
  event.set_file_version("brain.Event:2");
  return event.SerializeAsString();
}

std::string start_event(double wall_time, std::int64_t step) {
  TensorBoardEvent event = event_at(wall_time, step);
  event.mutable_session_log()->set_status(TensorBoardEvent::SessionLog::START);
  return event.SerializeAsString();
}

std::string scalar_event(double wall_time, std::int64_t step, std::string_view tag, float value) {
  TensorBoardEvent event = event_at(wall_time, step);
  TensorBoardEvent::Summary::Value& scalar = *event.mutable_summary()->add_value();
  scalar.set_tag(std::string(tag));
  scalar.set_simple_value(value);
  return event.SerializeAsString();
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
  file_.append(event_record(scalar_event(unix_seconds(), step, tag, static_cast<float>(value))));
}

void EventWriter::close() { file_.close(); }

}  // namespace birkhoff
