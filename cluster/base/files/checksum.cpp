#include "cluster/base/files/checksum.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cluster/base/files/file.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace birkhoff {
namespace {

// A CRC is a polynomial over GF(2) modulo P, stored with x^0 in the highest bit ("reflected").
constexpr std::uint32_t kPolynomial = 0x82f63b78;

constexpr std::uint32_t times_x(std::uint32_t a) {
  return (a & 1) != 0 ? (a >> 1) ^ kPolynomial : a >> 1;
}

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

// x^(8 n): multiplying by it appends n zero bytes.
constexpr std::uint32_t shift_by_bytes(std::uint64_t n) {
  std::uint32_t power = 0x00800000u;   // x^8
  std::uint32_t result = 0x80000000u;  // 1
  for (; n != 0; n >>= 1) {
    if ((n & 1) != 0) result = multiply(result, power);
    power = multiply(power, power);
  }
  return result;
}

// tables[k][byte]: the CRC of `byte` followed by k zero bytes ("slicing by 8", Kounavis and Berry
// 2005).
constexpr auto kTables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  }
  return tables;
}();

std::uint64_t load_u64(const unsigned char* bytes) {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

#if defined(__x86_64__)
// The instruction has a latency of 3 cycles and a throughput of 1: three independent lanes keep it
// busy. To join two lanes, the first one's checksum is shifted over the second lane, with one table
// for each byte of the shifted value.
constexpr std::size_t kLaneBytes = 1360;  // three of them are a page of 4 KiB, but for 16 bytes
constexpr auto kLaneShift = [] {
  std::array<std::array<std::uint32_t, 256>, 4> tables{};
  constexpr std::uint32_t kShift = shift_by_bytes(kLaneBytes);
  for (std::size_t k = 0; k < 4; ++k) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      tables[k][byte] = multiply(kShift, byte << (8 * k));
    }
  }
  return tables;
}();

std::uint32_t shift_over_lane(std::uint32_t crc) {
  return kLaneShift[0][crc & 0xff] ^ kLaneShift[1][(crc >> 8) & 0xff] ^
         kLaneShift[2][(crc >> 16) & 0xff] ^ kLaneShift[3][crc >> 24];
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(const void* data,
                                                             std::size_t num_bytes,
                                                             std::uint32_t crc) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; num_bytes >= 3 * kLaneBytes; bytes += 3 * kLaneBytes, num_bytes -= 3 * kLaneBytes) {
    std::uint64_t a = crc, b = 0, c = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += 8) {
      a = _mm_crc32_u64(a, load_u64(bytes + i));
      b = _mm_crc32_u64(b, load_u64(bytes + kLaneBytes + i));
      c = _mm_crc32_u64(c, load_u64(bytes + 2 * kLaneBytes + i));
    }
    crc = shift_over_lane(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
    crc = shift_over_lane(crc) ^ static_cast<std::uint32_t>(c);
  }
  std::uint64_t wide = crc;
  for (; num_bytes >= 8; bytes += 8, num_bytes -= 8) wide = _mm_crc32_u64(wide, load_u64(bytes));
  crc = static_cast<std::uint32_t>(wide);
  for (; num_bytes > 0; ++bytes, --num_bytes) crc = _mm_crc32_u8(crc, *bytes);
  return ~crc;
}
#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t num_bytes, std::uint32_t crc) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; num_bytes >= 8; bytes += 8, num_bytes -= 8) {
    crc ^= bytes[0] | std::uint32_t{bytes[1]} << 8 | std::uint32_t{bytes[2]} << 16 |
           std::uint32_t{bytes[3]} << 24;
    crc = kTables[7][crc & 0xff] ^ kTables[6][(crc >> 8) & 0xff] ^ kTables[5][(crc >> 16) & 0xff] ^
          kTables[4][crc >> 24] ^ kTables[3][bytes[4]] ^ kTables[2][bytes[5]] ^
          kTables[1][bytes[6]] ^ kTables[0][bytes[7]];
  }
  for (; num_bytes > 0; ++bytes, --num_bytes) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xff];
  }
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t num_bytes, std::uint32_t crc) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return crc32c_sse42(data, num_bytes, crc);
#endif
  return crc32c_portable(data, num_bytes, crc);
}

struct Xxh3Hasher::State {
  XXH3_state_t xxh3;
};

Xxh3Hasher::Xxh3Hasher() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh3); }
Xxh3Hasher::~Xxh3Hasher() = default;
Xxh3Hasher::Xxh3Hasher(Xxh3Hasher&&) noexcept = default;
Xxh3Hasher& Xxh3Hasher::operator=(Xxh3Hasher&&) noexcept = default;

void Xxh3Hasher::update(const void* data, std::size_t num_bytes) {
  XXH3_128bits_update(&state_->xxh3, data, num_bytes);
}

std::string Xxh3Hasher::hex_digest() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh3);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::uint64_t xxh3_high(const void* data, std::size_t num_bytes) {
  return XXH3_128bits(data, num_bytes).high64;
}

std::string xxh3_hex(const void* data, std::size_t num_bytes) {
  Xxh3Hasher hasher;
  hasher.update(data, num_bytes);
  return hasher.hex_digest();
}

std::string xxh3_hex(const File& file) {
  constexpr std::int64_t kPartBytes = 8 << 20;
  const std::int64_t num_bytes = file.size();
  Xxh3Hasher hasher;
  std::vector<char> part(static_cast<std::size_t>(std::min(kPartBytes, num_bytes)));
  for (std::int64_t at = 0; at < num_bytes; at += kPartBytes) {
    const auto count = static_cast<std::size_t>(std::min(kPartBytes, num_bytes - at));
    file.pread_exact(part.data(), count, at);
    hasher.update(part.data(), count);
  }
  return hasher.hex_digest();
}

std::uint64_t xxh3_64(const void* data, std::size_t num_bytes) {
  return XXH3_64bits(data, num_bytes);
}

}  // namespace birkhoff
