#include "child.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

std::string content(const std::string& path) {
  if (!fs::is_regular_file(path)) return "";  // /dev/full reads without end
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string unnamed_file() {
  std::string name = (fs::temp_directory_path() / "birkhoff_child_XXXXXX").string();
  const int fd = mkstemp(name.data());
  if (fd < 0) throw std::runtime_error("mkstemp " + name);
  close(fd);
  return name;
}

// In the child, after fork.
void redirect(const std::string& file, int flags, int to) {
  const int fd = open(file.c_str(), flags, 0666);
  if (fd < 0 || dup2(fd, to) < 0) _exit(126);
  if (fd != to) close(fd);
}

}  // namespace

Child::Child(Command command) : command_(std::move(command)) {
  if (command_.output.empty()) command_.output = unnamed_file();
  if (command_.errors.empty()) command_.errors = unnamed_file();
  std::vector<char*> argv;
  for (std::string& part : command_.line) argv.push_back(part.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ < 0) throw std::runtime_error("fork");
  if (pid_ == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a killed test leaves nothing running
    redirect(command_.input, O_RDONLY, STDIN_FILENO);
    redirect(command_.output, O_WRONLY | O_CREAT | O_TRUNC, STDOUT_FILENO);
    redirect(command_.errors, O_WRONLY | O_CREAT | O_TRUNC, STDERR_FILENO);
    if (chdir(command_.folder.c_str()) != 0) _exit(126);
    for (const auto& [name, value] : command_.environment) {
      if (value) {
        setenv(name.c_str(), value->c_str(), 1);
      } else {
        unsetenv(name.c_str());
      }
    }
    execvp(argv[0], argv.data());
    _exit(127);
  }
  setpgid(pid_, pid_);  // in parent and child, because either may run first
}

Child::~Child() {
  if (is_running()) {
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (const std::string& file : {command_.output, command_.errors}) {
    if (file.find("birkhoff_child_") != std::string::npos) fs::remove(file);
  }
}

void Child::signal(int number) const { kill(pid_, number); }

bool Child::is_running() {
  if (status_) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
  return !status_;
}

Finished Child::finish(std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (is_running() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  Finished finished;
  if (is_running()) {
    kill(-pid_, SIGKILL);
    int status = 0;
    waitpid(pid_, &status, 0);
    status_ = status;
  } else {
    finished.code = WIFSIGNALED(*status_) ? 128 + WTERMSIG(*status_) : WEXITSTATUS(*status_);
  }
  finished.out = content(command_.output);
  finished.err = content(command_.errors);
  return finished;
}

Finished run_child(Command command, std::chrono::seconds limit) {
  return Child(std::move(command)).finish(limit);
}

std::string program_path() {
  const char* set = std::getenv("BIRKHOFF_PROGRAM");
  return set != nullptr ? set : BIRKHOFF_PROGRAM;
}

std::vector<std::string> birkhoff_line(const std::vector<std::string>& arguments) {
  std::vector<std::string> line = {program_path()};
  line.insert(line.end(), arguments.begin(), arguments.end());
  return line;
}

std::vector<std::string> split_line(const std::string& line) {
  std::vector<std::string> parts;
  bool quoted = false, open = false;
  for (const char c : line) {
    if (c == '\'') {
      quoted = !quoted;
    } else if (c == ' ' && !quoted) {
      open = false;
      continue;
    }
    if (!open) parts.emplace_back();
    open = true;
    if (c != '\'') parts.back() += c;
  }
  return parts;
}

TemporaryFolder::TemporaryFolder(const std::string& name) {
  std::string path = (fs::temp_directory_path() / (name + "_XXXXXX")).string();
  if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp " + path);
  path_ = path;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code error;
  fs::remove_all(path_, error);
}

}  // namespace birkhoff
