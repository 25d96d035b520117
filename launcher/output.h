// Standard output of subcommands that print while they work.
#pragma once

#include <ostream>
#include <string>
#include <string_view>

namespace birkhoff {

// Flushes the printed output. Error(kStorage) if that fails, for instance on a full disk.
void flush_output(std::ostream& out);

// Whether standard output is a terminal. Ranks get a terminal of their own from Open MPI, so the
// supervisor tells those that it starts; ranks that the user's mpirun has started print as to a
// file.
bool output_is_terminal();
// The environment variable in which it says so: "terminal" or "file".
inline constexpr const char* kOutputVariable = "BIRKHOFF_OUTPUT";

// Makes any text safe for a terminal, which would execute control characters. Control characters
// other than newlines and tabs, and bytes that are not UTF-8, become \x1b; control characters
// beyond ASCII become \u009b.
std::string terminal_text(std::string_view text);

}  // namespace birkhoff
