#include "data/text/packed_text.h"

#include <fmt/format.h>

#include "cluster/base/error.h"

namespace birkhoff {

using namespace std::string_view_literals;

const std::array<Packing, kNumPackings> kPackings = {{
    {"gzip data", "zcat", kGzipStart},
    {"zstd data", "zstdcat", kZstdStart},
    {"bzip2 data", "bzcat", "BZh91AY&SY"},
    {"xz data", "xzcat",
     "\xfd"
     "7zXZ"},
    {"zip data", "unzip -p", "PK\x03\x04"},
    {"UTF-16", "iconv -f UTF-16 -t UTF-8", "\xff\xfe", "\xfe\xff"},
    {"UTF-32", "iconv -f UTF-32 -t UTF-8", "\xff\xfe\0\0"sv, "\0\0\xfe\xff"sv},
}};

std::size_t packing_of(std::string_view start) {
  // From the end: UTF-32's little-endian mark begins with UTF-16's, whose texts hold no NUL.
  for (std::size_t kind = kNumPackings; kind-- > 0;) {
    const Packing& packing = kPackings[kind];
    if (start.starts_with(packing.start) || start.starts_with(packing.or_start)) return kind;
  }
  return kNumPackings;
}

std::string pipe_of(const Packing& packing, const std::string& path) {
  return fmt::format("{} {}| birkhoff ... -", packing.reader,
                     path == kStandardInput ? "" : path + " ");
}

void require_not_packed(const std::string& shown_path, std::string_view start) {
  const std::size_t kind = packing_of(start);
  if (kind == kNumPackings) return;
  fail(ExitCode::kData, "{}: holds {}, not UTF-8 text, from byte 0 on; give its text: {}",
       shown_path, kPackings[kind].name, pipe_of(kPackings[kind], shown_path));
}

}  // namespace birkhoff
