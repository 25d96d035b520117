// The real program as a child process.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace birkhoff {

// Variables to set, or to remove where there is no value.
using Environment = std::vector<std::pair<std::string, std::optional<std::string>>>;

struct Command {
  std::vector<std::string> line;       // argv; the program by its path or from PATH
  std::filesystem::path folder = ".";  // working directory
  Environment environment = {};        // beside what this process has
  std::string input = "/dev/null", output = "", errors = "";  // files; empty: unnamed ones
};

struct Finished {
  int code = -1;  // exit code, 128 + n if ended by signal n, -1 if it had to be killed: too slow
  std::string out, err;
};

// A process group of its own, killed with all its members on destruction.
class Child {
 public:
  explicit Child(Command command);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  bool is_running();
  // Waits; kills it where it takes longer.
  Finished finish(std::chrono::seconds limit = std::chrono::seconds(120));

 private:
  Command command_;
  pid_t pid_ = -1;
  std::optional<int> status_;  // waitpid's, once it ended
};

Finished run_child(Command command, std::chrono::seconds limit = std::chrono::seconds(120));

// The program under test: of the build folder, or what the variable BIRKHOFF_PROGRAM says.
std::string program_path();

// `birkhoff ARGUMENTS...` of it.
std::vector<std::string> birkhoff_line(const std::vector<std::string>& arguments);

// A line as a shell would split it: at spaces, with '...' for what holds spaces. No other quoting.
std::vector<std::string> split_line(const std::string& line);

// A new empty folder, removed on destruction.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& name);
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace birkhoff
