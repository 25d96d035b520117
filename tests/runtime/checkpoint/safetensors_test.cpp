// The safetensors reader on damaged or malicious files, and on what the writer wrote.
#include "runtime/checkpoint/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "cluster/base/error.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

std::string with_length(std::uint64_t length, const std::string& rest) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + rest;
}

std::string file_of(const std::string& header, std::size_t data_bytes) {
  return with_length(header.size(), header + std::string(data_bytes, 'd'));
}

// A tensor's header entry; F32 [2] by default.
std::string entry(const std::string& name, const std::string& offsets,
                  const std::string& shape = "[2]", const std::string& dtype = "\"F32\"") {
  return fmt::format(R"("{}":{{"dtype":{},"shape":{},"data_offsets":{}}})", name, dtype, shape,
                     offsets);
}

std::string one(const std::string& text) { return "{" + text + "}"; }

std::vector<SafetensorsEntry> two_entries() {
  SafetensorsEntry a{"a", "F64", {2, 1}, 0, 0}, b{"b", "U8", {3}, 0, 0};
  return {a, b};
}

TEST(Safetensors, ReadsWhatItWrote) {
  const TestFolder folder;
  const std::string path = (folder.path() / "x.safetensors").string();
  std::string data(19, '\0');
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<char>(i + 1);
  }
  SafetensorsWriter writer(path, two_entries(), {{"format", "pt"}, {"note", "\"\xc3\xa9\""}});
  writer.write(data.data(), 5);  // pieces need not be tensors
  writer.write(data.data() + 5, 14);
  writer.finish();

  const std::string bytes = read_bytes(path);
  EXPECT_EQ(writer.num_bytes(), static_cast<std::int64_t>(bytes.size()));
  EXPECT_EQ(writer.hash(), xxh3_hex(bytes.data(), bytes.size()));
  EXPECT_EQ((bytes.size() - data.size()) % 64, 0u);

  const SafetensorsReader reader(path);
  ASSERT_EQ(reader.entries().size(), 2u);
  EXPECT_EQ(reader.entries()[0].name, "a");
  EXPECT_EQ(reader.entries()[0].dtype, "F64");
  EXPECT_EQ(reader.entries()[0].shape, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(reader.find("b")->begin, 16);
  EXPECT_EQ(reader.find("b")->end, 19);
  EXPECT_EQ(reader.find("c"), nullptr);
  EXPECT_EQ(reader.metadata().at("note"), "\"\xc3\xa9\"");
  EXPECT_EQ(reader.header_bytes() + data, bytes);
  std::string read(3, '\0');
  reader.read(read.data(), 3, 16);
  EXPECT_EQ(read, data.substr(16));
}

TEST(Safetensors, KnownBytes) {
  const TestFolder folder;
  const std::string path = (folder.path() / "x.safetensors").string();
  SafetensorsWriter writer(path, {{"a", "U8", {2}, 0, 0}}, {});
  writer.write("hi", 2);
  writer.finish();
  const std::string header = R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})";
  const std::string padding((128 - 8 - header.size()) % 64, ' ');
  EXPECT_EQ(read_bytes(path), with_length(header.size() + padding.size(), header + padding + "hi"));
}

TEST(Safetensors, WriterRefusesWhatDoesNotFit) {
  const TestFolder folder;
  const auto path = [&](const char* name) { return (folder.path() / name).string(); };
  SafetensorsWriter short_one(path("short"), two_entries(), {});
  short_one.write("0123456789", 10);
  EXPECT_THROW(short_one.finish(), Error);
  EXPECT_THROW(SafetensorsWriter(path("twice"), {two_entries()[0], two_entries()[0]}, {}), Error);
  EXPECT_THROW(SafetensorsWriter(path("dtype"), {{"a", "F8", {1}, 0, 0}}, {}), Error);
  EXPECT_THROW(SafetensorsWriter(path("huge"), {{"a", "F64", {INT64_MAX, 2}, 0, 0}}, {}), Error);
}

TEST(Safetensors, MalformedFilesAreRefused) {
  const std::string good = entry("a", "[0,8]");
  const std::string deep = std::string(200000, '[');
  struct Case {
    const char* what;
    std::string bytes;
  };
  const std::vector<Case> cases = {
      {"empty file", ""},
      {"too short for a length", std::string(7, '\0')},
      {"header of no bytes", with_length(0, "")},
      {"header longer than the file", with_length(100, "{}")},
      {"header longer than 100 MB", with_length(100'000'001, "{}")},
      {"header of 2^63", with_length(std::uint64_t{1} << 63, "{}")},
      {"header of 2^64 - 1", with_length(std::numeric_limits<std::uint64_t>::max(), "{}")},
      {"no JSON", file_of("{hello}", 0)},
      {"header cut off", file_of(one(good).substr(0, 30), 8)},
      {"text behind the object", file_of(one(good) + "x", 8)},
      {"two objects", file_of(one(good) + "{}", 8)},
      {"blank before the object", file_of(" " + one(good), 8)},
      {"a list", file_of("[]", 0)},
      {"a number", file_of("1", 0)},
      {"a string", file_of("\"{}\"", 0)},
      {"invalid UTF-8", file_of(one(entry("\xff\xfe", "[0,8]")), 8)},
      {"zero byte in the header", file_of(std::string("{\0}", 3), 0)},
      {"nested lists", file_of("{\"a\":" + deep, 0)},
      {"nested objects", file_of(
                             [] {
                               std::string text;
                               for (int i = 0; i < 100000; ++i) text += "{\"a\":";
                               return text;
                             }(),
                             0)},
      {"duplicate tensor", file_of(one(good + "," + good), 8)},
      {"duplicate key in a tensor",
       file_of(one(R"("a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})"), 8)},
      {"duplicate metadata", file_of(one(R"("__metadata__":{"k":"1","k":"2"})"), 0)},
      {"metadata of numbers", file_of(one(R"("__metadata__":{"k":1})"), 0)},
      {"metadata is a list", file_of(one(R"("__metadata__":[])"), 0)},
      {"tensor is a list", file_of(one(R"("a":[])"), 0)},
      {"tensor is null", file_of(one(R"("a":null)"), 0)},
      {"no dtype", file_of(one(R"("a":{"shape":[2],"data_offsets":[0,8]})"), 8)},
      {"no shape", file_of(one(R"("a":{"dtype":"F32","data_offsets":[0,8]})"), 8)},
      {"no offsets", file_of(one(R"("a":{"dtype":"F32","shape":[2]})"), 8)},
      {"a field too many",
       file_of(one(R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1})"), 8)},
      {"unknown dtype", file_of(one(entry("a", "[0,8]", "[2]", "\"F31\"")), 8)},
      {"dtype is a number", file_of(one(entry("a", "[0,8]", "[2]", "32")), 8)},
      {"shape is a number", file_of(one(entry("a", "[0,8]", "2")), 8)},
      {"shape of strings", file_of(one(entry("a", "[0,8]", "[\"2\"]")), 8)},
      {"negative size", file_of(one(entry("a", "[0,8]", "[-2]")), 8)},
      {"negative sizes whose product fits", file_of(one(entry("a", "[0,8]", "[-1,-2]")), 8)},
      {"fractional size", file_of(one(entry("a", "[0,8]", "[2.0]")), 8)},
      {"size beyond 64 bits", file_of(one(entry("a", "[0,8]", "[99999999999999999999]")), 8)},
      {"size beyond 63 bits", file_of(one(entry("a", "[0,8]", "[9223372036854775808]")), 8)},
      {"product that wraps to 8 bytes",
       file_of(one(entry("a", "[0,8]", "[4611686018427387905,2]")), 8)},
      {"product that wraps to 0", file_of(one(entry("a", "[0,0]", "[4294967296,4294967296]")), 0)},
      {"one offset", file_of(one(entry("a", "[8]")), 8)},
      {"three offsets", file_of(one(entry("a", "[0,4,8]")), 8)},
      {"offsets are strings", file_of(one(entry("a", "[\"0\",\"8\"]")), 8)},
      {"negative offset", file_of(one(entry("a", "[-8,0]")), 8)},
      {"offsets backwards", file_of(one(entry("a", "[8,0]")), 8)},
      {"offsets do not fit the shape", file_of(one(entry("a", "[0,4]")), 4)},
      {"offset near 2^63",
       file_of(one(entry("a", "[9223372036854775799,9223372036854775807]")), 8)},
      {"data missing", file_of(one(good), 7)},
      {"data left over", file_of(one(good), 9)},
      {"data without tensors", file_of("{}", 4)},
      {"hole at the start", file_of(one(entry("a", "[4,12]")), 12)},
      {"hole in the middle", file_of(one(good + "," + entry("b", "[12,20]")), 20)},
      {"overlap", file_of(one(good + "," + entry("b", "[4,12]")), 12)},
      {"the same bytes twice", file_of(one(good + "," + entry("b", "[0,8]")), 8)},
      {"empty tensor inside another", file_of(one(good + "," + entry("b", "[4,4]", "[0]")), 8)},
  };
  EXPECT_GE(cases.size(), 30u);
  const TestFolder folder;
  for (const Case& test : cases) {
    SCOPED_TRACE(test.what);
    const std::string path = (folder.path() / "bad.safetensors").string();
    write_bytes(path, test.bytes);
    try {
      const SafetensorsReader reader(path);
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
      EXPECT_THAT(error.what(), HasSubstr(path));
      EXPECT_LT(std::string(error.what()).size(), 600u) << "one line, not the file's content";
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    }
  }
}

TEST(Safetensors, UnusualButSoundFilesAreAccepted) {
  const TestFolder folder;
  const std::string path = (folder.path() / "good.safetensors").string();
  const std::vector<std::string> files = {
      file_of("{}", 0),
      file_of(one("") + "     ", 0),
      file_of(one(entry("s", "[0,4]", "[]")), 4),                          // scalar
      file_of(one(entry("b", "[8,16]") + "," + entry("a", "[0,8]")), 16),  // any order
      file_of(one(entry("z", "[8,8]", "[0,7]") + "," + entry("a", "[0,8]")),
              8),  // empty at the end
      file_of(one(entry("z", "[0,0]", "[3,0]") + "," + entry("a", "[0,8]")),
              8),  // empty at the start
      file_of(one(R"("__metadata__":{}, )" + entry("a", "[0,8]")), 8),
  };
  for (const std::string& bytes : files) {
    write_bytes(path, bytes);
    EXPECT_NO_THROW(SafetensorsReader{path}) << bytes.substr(8);
  }
}

}  // namespace
}  // namespace birkhoff
