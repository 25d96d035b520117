// A child process for third-party parsers (HDF5, SentencePiece) of possibly damaged files, so that
// a crash ends only the child.
#pragma once

#include <functional>
#include <string>

namespace birkhoff {

// Runs `body` in a forked child with no output and at most 10 s of CPU time, 30 s of wall time and
// 1 GiB more memory than the process has now. Returns when `body` returns, and rethrows its Error.
// Error(kData) that names `file` if the child ends in any other way. Changes that `body` makes are
// lost. Under sanitizers memory is not limited.
void run_limited(const std::string& file, const std::function<void()>& body);

}  // namespace birkhoff
