#include "launcher/measure/report.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>

#include "cluster/base/gpu/device.h"
#include "cluster/base/instruction_set.h"
#include "launcher/app.h"

namespace birkhoff {

double processor_seconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string report_title(const std::vector<std::string>& arguments, at::Device device, int ranks) {
  const std::string versions = version_text();
  std::string title =
      versions.substr(0, versions.find('\n')) + "; " + device_name(at::kCPU) +
      fmt::format(", {} thread{}", at::get_num_threads(), at::get_num_threads() == 1 ? "" : "s") +
      fmt::format(", {}", name_of(instruction_set()));
  if (device != at::kCPU) title += ", " + device_name(device);
  title += "; ";
  if (ranks > 1) title += fmt::format("{} ranks of ", ranks);
  title += "`birkhoff";
  for (const std::string& argument : arguments) {
    const bool plain = argument.find_first_of(" \t\n'\"{}[]*?$;&|<>()") == std::string::npos;
    title += plain ? " " + argument : " '" + argument + "'";
  }
  return title + "`\n";
}

std::string figure(double value) {
  return value < 1000 ? fmt::format("{:.4g}", value) : fmt::format("{:.0f}", value);
}

std::string table_row(const std::vector<std::string>& cells) {
  std::string row = "|";
  for (const std::string& cell : cells) row += " " + cell + " |";
  return row + "\n";
}

std::string table_head(const std::vector<std::string>& columns) {
  std::string head = table_row(columns) + "|";
  for (std::size_t i = 0; i < columns.size(); ++i) head += i == 0 ? "---|" : "---:|";
  return head + "\n";
}

}  // namespace birkhoff
