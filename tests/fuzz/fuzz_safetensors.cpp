#include "runtime/checkpoint/safetensors.h"

#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {
namespace {

void read_file_of(std::string_view bytes) {
  static const TemporaryFolder folder;
  const std::string path = write_input(folder, "x.safetensors", bytes);
  is_accepted(ExitCode::kCheckpoint, [&] {
    const SafetensorsReader reader(path);
    std::size_t end = reader.header_bytes().size();
    for (const SafetensorsEntry& entry : reader.entries()) {
      std::string data(static_cast<std::size_t>(entry.num_bytes()), '\0');
      reader.read(data.data(), data.size(), entry.begin);
      expect_promise(data == bytes.substr(end, data.size()), "tensors follow without gaps");
      expect_promise(reader.find(entry.name) == &entry, "tensors are found by their names");
      end += data.size();
    }
    expect_promise(end == bytes.size(), "header and tensors make up the file");
  });
}

}  // namespace

void fuzz_safetensors(std::string_view input) {
  read_file_of(input);

  ByteReader reader(input);
  const auto data_bytes = reader.take<std::uint16_t>();
  const std::uint64_t header_bytes = reader.rest().size();
  std::string file(reinterpret_cast<const char*>(&header_bytes), sizeof header_bytes);
  file.append(reader.rest());
  file.append(data_bytes, 'd');
  read_file_of(file);
}

}  // namespace birkhoff
