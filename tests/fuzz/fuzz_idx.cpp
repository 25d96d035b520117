#include "tests/fuzz/fuzz_images.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {

void fuzz_idx(std::string_view input) {
  static const TemporaryFolder folder;
  ByteReader reader(input);
  const std::size_t size = reader.take<std::uint16_t>();
  const std::string_view labels = reader.rest().substr(0, size);
  write_input(folder, "x-labels-idx1-ubyte", labels);
  read_image_array(write_input(folder, "x-images-idx3-ubyte", reader.rest().substr(labels.size())));
}

}  // namespace birkhoff
