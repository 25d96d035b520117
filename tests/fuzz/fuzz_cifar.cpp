#include "tests/fuzz/fuzz_images.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {

void fuzz_cifar(std::string_view input) {
  static const TemporaryFolder folder;
  read_image_array(write_input(folder, "x.bin", input));
}

}  // namespace birkhoff
