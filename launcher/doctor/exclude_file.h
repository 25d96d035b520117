// The file of hosts that failed an examination, one per line: `doctor` appends to it, and jobs of
// `submit` avoid these hosts. Local.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace birkhoff {

// Error(kUsage) if a line is not a host name, Error(kStorage) if the file cannot be read.
std::set<std::string> hosts_in_file(const std::string& path);

// Adds hosts to those that the file names already, if there is one. Durable.
void add_hosts_to_file(const std::string& path, const std::vector<std::string>& hosts);

}  // namespace birkhoff
