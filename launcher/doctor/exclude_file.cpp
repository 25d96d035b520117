#include "launcher/doctor/exclude_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <sstream>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "configs/loader/message_text.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{1} << 20;

bool is_host(const std::string& line) {
  return std::all_of(line.begin(), line.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '.' || c == '_';
  });
}

}  // namespace

std::set<std::string> hosts_in_file(const std::string& path) {
  std::set<std::string> hosts;
  std::istringstream lines(read_file(path, kMaxBytes));
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (!is_host(line)) {
      fail(ExitCode::kUsage, "{}: line {} is {}, not the name of a host: write one name a line",
           path, number, birkhoff::quoted(line));
    }
    if (!line.empty()) hosts.insert(line);
  }
  return hosts;
}

void add_hosts_to_file(const std::string& path, const std::vector<std::string>& hosts) {
  std::set<std::string> all(hosts.begin(), hosts.end());
  if (path_exists(path)) all.merge(hosts_in_file(path));
  write_file_durably(path, fmt::format("{}{}", fmt::join(all, "\n"), all.empty() ? "" : "\n"));
}

}  // namespace birkhoff
