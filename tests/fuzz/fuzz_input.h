// Shared by the fuzz targets: parsing inputs, writing them to files, and recognizing a refusal.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cluster/base/error.h"
#include "tests/cluster/base/temporary_folder.h"

namespace birkhoff {

// A promise of the product that an input broke.
inline void expect_promise(bool kept, const std::string& promise) {
  if (!kept) throw std::logic_error("broken promise: " + promise);
}

// A refusal must be one short line.
inline void expect_line(const std::string& what) {
  expect_promise(!what.empty() && what.size() < 1000,
                 fmt::format("a short message, not {} bytes", what.size()));
  for (const char c : what) {
    expect_promise(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f,
                   "a line without control characters: " + what);
  }
}

// Runs `body`. Returns true if it returns. An Error must have this code and be one short line.
template <typename Body>
bool is_accepted(ExitCode code, Body body) {
  try {
    body();
    return true;
  } catch (const Error& error) {
    const std::string what = error.what();
    expect_promise(error.code() == code,
                   fmt::format("exit code {} here, not {}: {}", static_cast<int>(code),
                               static_cast<int>(error.code()), what));
    expect_line(what);
    return false;
  }
}

// Takes numbers from the front of an input; zeros once the input is used up.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  template <typename Number>
  Number take() {
    Number number = 0;
    const std::size_t size = std::min(sizeof number, rest_.size());
    rest_.copy(reinterpret_cast<char*>(&number), size);
    rest_.remove_prefix(size);
    return number;
  }
  // Mostly small numbers; after a byte of 255, any number.
  std::int64_t take_size() {
    const auto byte = take<std::uint8_t>();
    return byte < 255 ? byte : take<std::int64_t>();
  }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

// Overwrites the file and returns its path.
inline std::string write_input(const TemporaryFolder& folder, const std::string& name,
                               std::string_view bytes) {
  const std::string path = folder.path(name);
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out) throw std::runtime_error("cannot write " + path);
  return path;
}

}  // namespace birkhoff
