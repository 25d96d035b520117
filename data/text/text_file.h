// A file of text that is read from its beginning to its end, whether it is compressed or not: gzip
// (RFC 1952) and zstd (RFC 8878) data, which their first bytes tell, are unpacked on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "cluster/base/files/file.h"

namespace birkhoff {

// Memory does not depend on the size of the file: at most 128 MiB, the longest window of zstd data
// that was not made with --long.
class TextFile {
 public:
  // `file` has not been read yet; it may be a pipe. shown_path: for messages.
  TextFile(File file, std::string shown_path);
  ~TextFile();
  TextFile(TextFile&&) noexcept;
  TextFile& operator=(TextFile&&) noexcept;

  // Reads at most num_bytes of the text and returns how many it has read; 0 at its end. Compressed
  // data that is damaged or ends early, or has other bytes after it: Error(kData) with the file and
  // the reason.
  std::size_t read_some(char* out, std::size_t num_bytes);
  // Whether the file is compressed. Waits for its first bytes.
  bool is_packed();

 private:
  struct Input;
  class Unpacker;
  class Gzip;
  class Zstd;
  void begin();  // chooses unpacker_

  std::unique_ptr<Input> input_;
  std::unique_ptr<Unpacker> unpacker_;  // null: the file holds the text itself
  bool has_begun_ = false;
};

}  // namespace birkhoff
