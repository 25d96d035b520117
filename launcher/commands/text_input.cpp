#include "launcher/commands/text_input.h"

#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/utf8.h"
#include "data/text/packed_text.h"

namespace birkhoff {

TextLines open_lines(const std::string& path) {
  if (path == "-") return {File::standard_input(), kStandardInput};
  File file = File::open_stream_for_read(path, ExitCode::kUsage);
  file.wait_for_input();
  return {std::move(file), path};
}

void check_utf8(std::string_view line, const std::string& place) {
  if (const std::size_t bad = find_invalid_utf8(line); bad != std::string_view::npos) {
    fail(ExitCode::kData, "{}: byte {} of the line is not UTF-8; convert the text to UTF-8", place,
         bad);
  }
}

}  // namespace birkhoff
