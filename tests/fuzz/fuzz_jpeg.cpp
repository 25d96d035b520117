#include "data/images/picture.h"
#include "tests/fuzz/fuzz_images.h"
#include "tests/fuzz/fuzz_targets.h"

namespace birkhoff {

void fuzz_jpeg(std::string_view input) {
  // Larger images take the memory and the time that their headers ask for.
  constexpr std::int64_t kMaxPixels = 1 << 20;
  read_or_refuse([&] { expect_whole(read_jpeg(input, kMaxPixels)); });
}

}  // namespace birkhoff
