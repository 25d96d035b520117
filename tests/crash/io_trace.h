// Records what a test does to the files below one folder, call by call, in the order in which the
// kernel executed the calls. The test program defines open, write, rename, ... itself. The dynamic
// linker prefers these to libc's in every library of the process, so the product needs no change.
// The recorder cannot see calls inside libc (such as fopen's), memory maps and other processes.
// Such changes are still detected: crash_states() compares the recording with the files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace birkhoff {

// Everything below a folder, by path relative to it: the bytes of a file, null for a folder.
using Content = std::shared_ptr<const std::string>;
using FileTree = std::map<std::string, Content>;

FileTree read_tree(const std::filesystem::path& folder);
// Writes into an existing, empty folder.
void write_tree(const FileTree& tree, const std::filesystem::path& folder);

// A call that succeeded. Paths are relative to the folder; "" is the folder itself.
struct IoEvent {
  enum class Kind {
    kOpen,
    kWrite,
    kTruncate,
    kSync,
    kRename,
    kLink,
    kMakeFolder,
    kRemoveFile,
    kRemoveFolder,
    kMark,
  };
  Kind kind = Kind::kMark;
  std::string path;        // of open, rename and link (from), make, remove
  std::string new_path;    // of rename, link
  bool truncates = false;  // of open
  std::size_t opened = 0;  // of write, truncate, sync: the number of the event that opened the file
  std::int64_t offset = 0;  // of write; of truncate: the new size
  std::string bytes;        // of write
  std::int64_t mark = 0;
};

struct IoTrace {
  FileTree before;  // durable when the recording begins
  std::vector<IoEvent> events;
  FileTree after;
};

// Runs `body` and records its calls below `folder`. `body` must use the same spelling of the
// folder's absolute path. It may start threads that end before it returns. One recording at a time.
IoTrace record_io(const std::filesystem::path& folder, const std::function<void()>& body);

// Puts a mark > 0 into the active recording: from here on the program has promised something. Does
// nothing if no recording is active.
void mark_io(std::int64_t mark);

// For messages: "write of 100 bytes at 0 to a/b".
std::string describe(const IoTrace& trace, std::size_t event);

}  // namespace birkhoff
