// Standard output of subcommands that print while they work.
#pragma once

#include <ostream>
#include <string>
#include <string_view>

namespace birkhoff {

// Flushes the printed output. Error(kStorage) if that fails, for instance on a full disk.
void flush_output(std::ostream& out);

// Makes any text safe for a terminal, which would execute control characters. Control characters
// other than newlines and tabs, and bytes that are not UTF-8, become \x1b; control characters
// beyond ASCII become \u009b.
std::string terminal_text(std::string_view text);

}  // namespace birkhoff
