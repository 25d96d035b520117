#include "cluster/base/files/checksum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cluster/base/files/file.h"
#include "tests/cluster/base/temporary_folder.h"

namespace birkhoff {
namespace {

std::string random_bytes(std::size_t num_bytes) {
  std::mt19937 generator(1);
  std::string bytes(num_bytes, '\0');
  for (char& byte : bytes) byte = static_cast<char>(generator());
  return bytes;
}

// RFC 3720, appendix B.4, and the usual check string.
TEST(Crc32c, KnownAnswers) {
  unsigned char ascending[32], descending[32];
  for (unsigned char i = 0; i < 32; ++i) {
    ascending[i] = i;
    descending[i] = static_cast<unsigned char>(31 - i);
  }
  const std::string zeros(32, '\0'), ones(32, '\xff');
  for (auto* crc : {&crc32c, &crc32c_portable}) {
    EXPECT_EQ(crc("", 0, 0), 0u);
    EXPECT_EQ(crc("123456789", 9, 0), 0xe3069283u);
    EXPECT_EQ(crc(zeros.data(), 32, 0), 0x8a9136aau);
    EXPECT_EQ(crc(ones.data(), 32, 0), 0x62a8ab43u);
    EXPECT_EQ(crc(ascending, 32, 0), 0x46dd794eu);
    EXPECT_EQ(crc(descending, 32, 0), 0x113fdb5cu);
  }
}

TEST(Crc32c, InstructionAndTablesAgreeAtEveryLengthAndAlignment) {
  const std::string bytes = random_bytes(20000);
  for (std::size_t start : {0, 1, 7}) {
    for (std::size_t n : {0, 1, 7, 8, 9, 63, 1360, 4079, 4080, 4081, 4096, 8160, 12288, 19990}) {
      EXPECT_EQ(crc32c(bytes.data() + start, n), crc32c_portable(bytes.data() + start, n)) << n;
    }
  }
}

TEST(Crc32c, Continues) {
  const std::string bytes = random_bytes(20000);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (std::size_t cut : {0, 1, 5000, 19999, 20000}) {
    const std::uint32_t a = crc32c(bytes.data(), cut);
    EXPECT_EQ(crc32c(bytes.data() + cut, bytes.size() - cut, a), whole);
  }
}

TEST(Crc32c, SeesEverySingleFlippedBit) {
  std::string bytes = random_bytes(200);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_NE(crc32c(bytes.data(), bytes.size()), whole);
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
  }
}

TEST(Xxh3, KnownAnswersAndStreaming) {
  EXPECT_EQ(xxh3_hex("", 0), "99aa06d3014798d86001c324468d497f");
  const std::string bytes = random_bytes(10000);
  const std::string whole = xxh3_hex(bytes.data(), bytes.size());
  Xxh3Hasher hasher;
  hasher.update(bytes.data(), 1);
  hasher.update(bytes.data() + 1, 6000);
  EXPECT_NE(hasher.hex_digest(), whole);
  hasher.update(bytes.data() + 6001, bytes.size() - 6001);
  EXPECT_EQ(hasher.hex_digest(), whole);
  EXPECT_EQ(whole.size(), 32u);
}

TEST(Xxh3, AFileHasTheHashOfItsBytes) {
  constexpr std::size_t kPart = 8 << 20;  // as many bytes are read at a time
  const TemporaryFolder folder;
  const std::string bytes = random_bytes(kPart + 1), path = folder.path("file");
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, kPart, kPart + 1}) {
    remove_tree(path);
    File file = File::create(path);
    file.write_all(bytes.data(), size);
    file.close();
    EXPECT_EQ(xxh3_hex(File::open_for_read(path)), xxh3_hex(bytes.data(), size)) << size;
  }
}

}  // namespace
}  // namespace birkhoff
