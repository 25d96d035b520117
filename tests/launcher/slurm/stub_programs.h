// Stubs of programs: bash scripts in a folder for PATH, which note their arguments.
#pragma once

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {

class StubPrograms {
 public:
  explicit StubPrograms(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_ / "calls");
  }

  // For PATH: the stubs before the system's programs.
  std::string path() const { return folder_.string() + ":" + std::getenv("PATH"); }

  void write(const std::string& name, const std::string& body) { write_at(folder_ / name, body); }
  // The same at another place. `body`: bash; it runs after the call was noted.
  void write_at(const std::filesystem::path& file, const std::string& body) {
    const std::string note = "'" + (folder_ / "calls").string() + "'/\"$(basename \"$0\")\"";
    write_bytes(file.string(),
                "#!/bin/bash\nprintf '%s\\0' \"$@\" '<end>' >>" + note + "\n" + body + "\n");
    chmod(file.c_str(), 0755);
  }

  void forget_calls() {
    for (const auto& file : std::filesystem::directory_iterator(folder_ / "calls")) {
      std::filesystem::remove(file);
    }
  }
  // The arguments of each call so far.
  std::vector<std::vector<std::string>> calls(const std::string& name) const {
    std::vector<std::vector<std::string>> found;
    const std::string file = (folder_ / "calls" / name).string();
    if (!std::filesystem::exists(file)) return found;
    const std::string bytes = read_bytes(file);
    std::vector<std::string> call;
    for (std::size_t begin = 0; begin < bytes.size();) {
      const std::size_t end = bytes.find('\0', begin);
      const std::string argument = bytes.substr(begin, end - begin);
      begin = end + 1;
      if (argument != "<end>") {
        call.push_back(argument);
        continue;
      }
      found.push_back(call);
      call.clear();
    }
    return found;
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace birkhoff
