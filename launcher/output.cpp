#include "launcher/output.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "cluster/base/error.h"
#include "cluster/base/text/utf8.h"

namespace birkhoff {

void flush_output(std::ostream& out) {
  out.flush();
  if (!out)
    fail(ExitCode::kStorage,
         "standard output cannot be written: {}; free space there or write elsewhere",
         std::strerror(errno));
}

bool output_is_terminal() {
  if (const char* said = std::getenv(kOutputVariable)) return std::string_view(said) == "terminal";
  return std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr && isatty(STDOUT_FILENO) != 0;
}

std::string terminal_text(std::string_view text) {
  std::string safe;
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Character character = utf8_at(text, i);
    const std::uint32_t c = character.code_point;
    const bool is_control = c < 0x20 || c == 0x7f;
    if (character.bytes == 0 || (is_control && c != '\n' && c != '\t')) {
      safe += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[i++]));
      continue;
    }
    const auto bytes = static_cast<std::size_t>(character.bytes);
    const bool is_c1_control = c >= 0x80 && c < 0xa0;
    safe += is_c1_control ? fmt::format("\\u{:04x}", c) : std::string(text.substr(i, bytes));
    i += bytes;
  }
  return safe;
}

}  // namespace birkhoff
