// Checksums of files and tensors: CRC32C for pages and records, XXH3-128 for whole files, XXH3-64
// for comparing the memory of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace birkhoff {

class File;

// CRC32C (Castagnoli; RFC 3720 B.4). `crc` continues an earlier result: crc32c(b, n, crc32c(a, m))
// is the CRC of a followed by b.
std::uint32_t crc32c(const void* data, std::size_t num_bytes, std::uint32_t crc = 0);
// The table-driven implementation for machines without the CRC instruction; public for its test.
std::uint32_t crc32c_portable(const void* data, std::size_t num_bytes, std::uint32_t crc = 0);

// Streaming XXH3-128 with seed 0, as 32 lower-case hexadecimal digits (what `xxh128sum` prints).
class Xxh3Hasher {
 public:
  Xxh3Hasher();
  ~Xxh3Hasher();
  Xxh3Hasher(Xxh3Hasher&&) noexcept;
  Xxh3Hasher& operator=(Xxh3Hasher&&) noexcept;
  void update(const void* data, std::size_t num_bytes);
  // The digest of all bytes so far; more may follow.
  std::string hex_digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string xxh3_hex(const void* data, std::size_t num_bytes);
// The digest of a whole file.
std::string xxh3_hex(const File& file);
// The number that the first 16 digits of xxh3_hex() are.
std::uint64_t xxh3_high(const void* data, std::size_t num_bytes);
// XXH3-64 with seed 0.
std::uint64_t xxh3_64(const void* data, std::size_t num_bytes);

}  // namespace birkhoff
