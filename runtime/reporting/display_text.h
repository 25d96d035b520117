// User-supplied names made safe to display: in a terminal's columns, in a picture. Local.
#pragma once

#include <string>
#include <string_view>

namespace birkhoff {

// One line of UTF-8 that any terminal and any XML reader accepts: a question mark replaces each
// control character, each character that reorders text, and each byte that is not UTF-8.
std::string display_text(std::string_view text);

// Terminal columns that display_text() takes: 2 for a wide character (East Asian, emoji), 0 for an
// accent that joins the character before it.
int display_columns(std::string_view text);

// The text itself, or "..." and as much of its end as fits into `columns` columns (at least 4).
std::string last_columns(std::string_view text, int columns);

}  // namespace birkhoff
