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

// Variables to set, or to remove if there is no value.
using Environment = std::vector<std::pair<std::string, std::optional<std::string>>>;

struct Command {
  std::vector<std::string> line;       // argv; the program by its path or from PATH
  std::filesystem::path folder = ".";  // working directory
  Environment environment = {};        // in addition to this process's environment
  std::string input = "/dev/null", output = "", errors = "";  // files; empty: unnamed ones
};

struct Finished {
  int code = -1;  // exit code, 128 + n if ended by signal n, -1 if killed for being too slow
  std::string out, err;
};

// A child process in its own process group, which the destructor kills with all its members.
class Child {
 public:
  explicit Child(Command command);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  bool is_running();
  // Waits for the end; kills the child if it takes longer.
  Finished finish(std::chrono::seconds limit = std::chrono::seconds(120));

 private:
  Command command_;
  pid_t pid_ = -1;
  std::optional<int> status_;  // waitpid's, once it has ended
};

Finished run_child(Command command, std::chrono::seconds limit = std::chrono::seconds(120));

// The program under test: the build folder's, or the one that the variable BIRKHOFF_PROGRAM names.
std::string program_path();

// The command line `birkhoff ARGUMENTS...` with that program.
std::vector<std::string> birkhoff_line(const std::vector<std::string>& arguments);

// Splits a line like a shell: at spaces, with '...' around words that contain spaces. No other
// quoting.
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
