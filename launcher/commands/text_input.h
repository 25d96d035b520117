// Lines of text that the user names: a file, a pipe, or "-", standard input.
#pragma once

#include <string>
#include <string_view>

#include "data/text/text_lines.h"

namespace birkhoff {

// A pipe must begin to deliver within File::kPipeSeconds; standard input may take any time.
TextLines open_lines(const std::string& path);

// Error(kData) with `place` if the line is not UTF-8.
void check_utf8(std::string_view line, const std::string& place);

}  // namespace birkhoff
