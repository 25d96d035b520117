// Foreign parsers (HDF5, SentencePiece) on files that may be damaged run in a child process, which
// they may crash.
#pragma once

#include <functional>
#include <string>

namespace birkhoff {

// Runs `body` in a forked child with at most 10 s of processor time, 30 s of wall time, 1 GiB more
// memory than now and no output. Returns if it returns, rethrows its Error. Error(kData) naming
// `file` if the child ended otherwise. What body changes is lost. The limit on memory is left out
// under sanitizers.
void run_limited(const std::string& file, const std::function<void()>& body);

}  // namespace birkhoff
