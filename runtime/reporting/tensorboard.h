// TensorBoard event files: records of length, masked CRC32C, and an event
// (configs/schema/tensorboard_event.proto).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "runtime/reporting/telemetry_file.h"

namespace birkhoff {

// wall_time: seconds since 1970.
std::string version_event(double wall_time);
// Tells TensorBoard to forget the values of `step` and later in earlier files: the run has returned
// to a checkpoint.
std::string start_event(double wall_time, std::int64_t step);
std::string scalar_event(double wall_time, std::int64_t step, std::string_view tag, float value);
// An event in the form of a file's record.
std::string event_record(std::string_view event);

class EventWriter {
 public:
  // Creates a new file in `folder`. first_step: the first step it will hold. Error(kStorage) here;
  // later calls warn if the file cannot be written, and do not throw.
  EventWriter(const std::filesystem::path& folder, std::int64_t first_step, TelemetryWarning warn);
  void scalar(std::string_view tag, std::int64_t step, double value);
  // Must be called at the end.
  void close();

 private:
  TelemetryFile file_;
};

}  // namespace birkhoff
