// Child processes for third-party parsers (HDF5, SentencePiece, image formats) of possibly damaged
// files, so that a crash ends only the child.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"

namespace birkhoff {

// What a child may use: processor time and wall time for each request, and memory beyond what the
// process has when it forks. Under sanitizers memory is not limited.
struct ChildLimits {
  int cpu_seconds = 10, wall_seconds = 30;
  std::int64_t more_bytes = 1 << 30;
};

// A forked child that answers requests, one after another. Its output goes to /dev/null. All files
// of the parent are closed in it. The first request starts it; after it has ended early, the next
// request starts another. A request in which something outside ended the child (SIGKILL when memory
// is short, SIGTERM, its wall time is over) is tried once more.
class LimitedChild {
 public:
  // Runs in the child. What it keeps between requests is lost when the child ends.
  using Serve = std::function<std::string(const std::string& request)>;
  struct Answer {
    ExitCode code = ExitCode::kOk;  // else of the Error, or kMemory without memory; text says which
    std::string text;               // what `serve` returned
    // The child ended in this request: text says how ("ended by signal 11"). code: kData after a
    // crash or the limit of processor time; kMemory (SIGKILL) or kStorage if something outside
    // ended it twice.
    bool ended = false;

    // What helps if something outside has ended the child.
    const char* cure() const;
    // Why the file that the request was about could not be read, beginning with its path; empty: it
    // could. Throws errors of the machine and of the file system.
    std::string damage(const std::string& path) const;
    // The damage of a file whose answer has not the form that it should have: code of a malicious
    // file may have run in the child.
    std::string strange(const std::string& path) const;
  };

  explicit LimitedChild(Serve serve, ChildLimits limits = {});
  ~LimitedChild();
  LimitedChild(const LimitedChild&) = delete;
  LimitedChild& operator=(const LimitedChild&) = delete;

  // Calls take(i, answer) for each request, in order. The child works on a request while `take`
  // looks at an earlier answer. If `take` throws, the child ends.
  void answer(const std::vector<std::string>& requests,
              const std::function<void(std::size_t i, Answer answer)>& take);
  Answer answer(const std::string& request);

 private:
  void start();
  void stop();
  // Waits for the child, which is ending, and returns how it ended.
  Answer end();
  // The answer to the first request that has none, or how the child ended.
  Answer receive();
  [[noreturn]] void be_child(int socket) const;

  const Serve serve_;
  const ChildLimits limits_;
  pid_t child_ = -1;
  UniqueHandle<FileDescriptorTraits> socket_;
};

// Runs `body` in a child with the default limits. Returns when `body` returns, and rethrows its
// Error. If the child ends in any other way, an Error with the code of its Answer names `file`.
// Changes that `body` makes are lost.
void run_limited(const std::string& file, const std::function<void()>& body);

}  // namespace birkhoff
