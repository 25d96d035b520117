#include "launcher/processes/scratch_folder.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

// Returns when no process holds the other end.
void wait_for_end(int pipe_end) {
  char byte = 0;
  while (::read(pipe_end, &byte, 1) < 0 && errno == EINTR) {
  }
}

[[noreturn]] void be_remover(int pipe_end, const fs::path& folder) {
  ::setsid();  // so that Ctrl-C does not reach this process
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) std::signal(number, SIG_IGN);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, stream);
  wait_for_end(pipe_end);
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  ::_exit(0);
}

}  // namespace

ScratchFolder::ScratchFolder(const std::string& name) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    fail(ExitCode::kStorage, "pipe: {}; free resources", std::strerror(errno));
  UniqueHandle<FileDescriptorTraits> waited_for(ends[0]);
  alive_ = UniqueHandle<FileDescriptorTraits>(ends[1]);
  std::string path = (fs::temp_directory_path() / ("birkhoff_" + name + "_XXXXXX")).string();
  if (::mkdtemp(path.data()) == nullptr) {
    fail(ExitCode::kStorage, "mkdtemp of '{}': {}; set TMPDIR to a folder with free space", path,
         std::strerror(errno));
  }
  path_ = path;
  remover_ = ::fork();
  if (remover_ < 0) {
    const int error = errno;
    ::rmdir(path.c_str());
    fail(ExitCode::kMemory, "fork: {}; free resources", std::strerror(error));
  }
  if (remover_ == 0) {
    alive_.reset();
    be_remover(waited_for.get(), path_);
  }
}

ScratchFolder::~ScratchFolder() {
  alive_.reset();
  while (::waitpid(remover_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace birkhoff
