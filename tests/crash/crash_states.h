// The possible contents of a file system after the machine stopped between two calls of a recorded
// program.
//
// The model is that of ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018),
// under the minimal guarantees of POSIX; real file systems guarantee more:
//   - fsync of a file makes its bytes and size durable, but not its name;
//   - fsync of a folder makes the names in it durable, not the contents of what they name;
//   - rename is atomic: both names change, or none;
//   - operations on one name take effect in order;
//   - everything else that was not synced may be lost or kept in any combination: a rename without
//     the file's bytes, a later write without an earlier one, a size without the bytes;
//   - a write may be torn at multiples of 512 bytes of the file; a sector is either old or new.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/crash/io_trace.h"

namespace birkhoff {

struct CrashState {
  FileTree tree;
  std::size_t cut = 0;    // the calls of events [0, cut) were made, and no later ones
  std::int64_t mark = 0;  // the largest mark among them, 0 if there is none
  std::string lost;       // which of them are lost, in part or completely, for messages
};

// Returns states that differ in tree or mark, ordered by cut. For each cut these are lost:
//   - nothing; everything that was not synced; all unsynced bytes but no names; or the reverse;
//   - only one operation on names; all but one; or all from one on. Each of these with all bytes,
//     and without the unsynced bytes;
//   - the unsynced bytes of one file. If the last call concerned the file or a folder that contains
//     it, also only one write, all but one, or all from one on; and each write torn at each sector,
//     and without each sector;
//   - some random combinations of all these.
// If there are more than `limit` states, returns a sample: no cut contributes a second state before
// each cut has contributed one, and so on. The same trace, limit and seed give the same states.
// Returns only cuts >= first_cut. Throws std::logic_error if the trace misses calls, so that it
// does not lead to the tree that was found at its end.
std::vector<CrashState> crash_states(const IoTrace& trace, std::size_t limit,
                                     std::uint64_t seed = 1, std::size_t first_cut = 0);

// `count` numbers of [0, end), evenly spaced, ascending; all numbers if there are no more.
std::vector<std::size_t> evenly_spaced(std::size_t count, std::size_t end);

// Cuts where a kill may leave unsynced names: `count` cuts of the trace, first those after a mkdir,
// then those after a rename, then others, evenly spaced. All cuts if there are no more.
std::vector<std::size_t> kill_points(const IoTrace& trace, std::size_t count);

// Simulates that the program is killed after `cut` calls, while the system keeps running and loses
// nothing. Writes that state into `folder`, which must be empty, and records `body`, which starts
// from it. In the result, body's calls follow those of the killed program. A crash of the machine
// may still lose data that neither of them synced.
IoTrace record_after_kill(const IoTrace& killed, std::size_t cut,
                          const std::filesystem::path& folder, const std::function<void()>& body);

// The first cut after a mark among the events [from, end).
std::size_t first_promise(const IoTrace& trace, std::size_t from);

}  // namespace birkhoff
