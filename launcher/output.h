// Standard output of the verbs that print while they work.
#pragma once

#include <ostream>
#include <string>
#include <string_view>

namespace birkhoff {

// What was printed counts only once it is out: Error(kStorage) if that fails, for instance on a
// full disk.
void flush_output(std::ostream& out);

// Text of any origin for a terminal, which would obey control characters: those other than line
// ends and tabs, and bytes that are no UTF-8, are written as \x1b, those beyond ASCII as \u009b.
std::string terminal_text(std::string_view text);

}  // namespace birkhoff
