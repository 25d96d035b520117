// What a file system may hold after the machine stopped between two calls of a recorded program.
//
// The model is that of ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018),
// with the least that POSIX promises; real file systems promise more:
//   - fsync of a file makes its bytes and size durable, but not its name;
//   - fsync of a folder makes the names in it durable, not the contents of what they name;
//   - rename is atomic: both names change, or none;
//   - operations on one name take effect in their order;
//   - all else that was not synced may be lost or kept in any combination: a rename without the
//     bytes of the file, a later write without an earlier one, a size without the bytes;
//   - a write may be torn at multiples of 512 bytes of the file; a sector is old or new.
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
  std::size_t cut = 0;    // the calls of events [0, cut) were made, no later one
  std::int64_t mark = 0;  // the largest among them, 0 where there is none
  std::string lost;       // which of them are lost in part or wholly, for messages
};

// States that differ in tree or mark, ordered by cut. For each cut:
//   - nothing is lost; all is lost that was not synced; all such bytes are and no name; or reverse;
//   - of the operations on names each is lost alone, each is kept alone, and those from one on are
//     lost; each time with all bytes and without those that were not synced;
//   - of each file the unsynced bytes are lost. If the last call concerned the file, or a folder
//     that it lies in: also each write is lost alone, kept alone, torn at each sector, and lacks
//     each sector, and those from one on are lost;
//   - some random combinations of all that.
// If that is more than `limit`, a sample: no cut gives a second state before each has given one,
// and so on. The same trace, limit and seed give the same states. Only cuts >= first_cut.
// std::logic_error if the trace misses calls: what it leads to is not what was found at its end.
std::vector<CrashState> crash_states(const IoTrace& trace, std::size_t limit,
                                     std::uint64_t seed = 1, std::size_t first_cut = 0);

// `count` numbers of [0, end), evenly spaced, ascending; all of them if there are no more.
std::vector<std::size_t> evenly_spaced(std::size_t count, std::size_t end);

// Where a kill may leave names that were not synced: `count` cuts of the trace, first those behind
// a mkdir, then those behind a rename, then others, evenly spaced. All cuts if it has no more.
std::vector<std::size_t> kill_points(const IoTrace& trace, std::size_t count);

// The program is killed behind `cut` calls, the system goes on and loses nothing: writes that into
// `folder`, which is empty, and records `body`, which starts from there. In the result body's calls
// follow those of the killed program; what neither of them synced, a crash of the machine may still
// lose.
IoTrace record_after_kill(const IoTrace& killed, std::size_t cut,
                          const std::filesystem::path& folder, const std::function<void()>& body);

// The first cut behind a mark among the events [from, end).
std::size_t first_promise(const IoTrace& trace, std::size_t from);

}  // namespace birkhoff
