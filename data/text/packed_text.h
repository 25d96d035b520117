// Files that hold something other than UTF-8 text, by their first bytes.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

namespace birkhoff {

inline constexpr char kStandardInput[] = "standard input";  // the name of "-" in messages

// The byte order mark that UTF-8 may begin with.
inline constexpr std::string_view kUtf8Mark = "\xef\xbb\xbf";

// The first bytes of gzip data (RFC 1952) and of zstd data (RFC 8878).
inline constexpr std::string_view kGzipStart = "\x1f\x8b", kZstdStart = "\x28\xb5\x2f\xfd";

struct Packing {
  const char* name;
  const char* reader;      // the command that prints the text of such a file
  std::string_view start;  // the first bytes of a file
  std::string_view or_start = start;
};

// gzip and zstd data within text that was unpacked already (data/text/text_file.h) are named, too.
inline constexpr std::size_t kNumPackings = 7;
extern const std::array<Packing, kNumPackings> kPackings;

// Index in kPackings of what begins with these bytes; kNumPackings: none of them.
std::size_t packing_of(std::string_view start);

// A pipe that gives the text of such a file to a command of ours.
std::string pipe_of(const Packing& packing, const std::string& path);

// Error(kData) if a file is compressed or UTF-16. It names the command that prints the text.
void require_not_packed(const std::string& shown_path, std::string_view start);

}  // namespace birkhoff
