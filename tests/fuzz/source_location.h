// libstdc++ 12 has std::source_location only for compilers with __builtin_source_location, which
// clang 14 lacks. The fuzz build includes this file first. It provides the parts that
// cluster/base/error.h uses.
#pragma once

#include <version>

#if defined(__clang__) && !__has_builtin(__builtin_source_location)
namespace std {
class source_location {
 public:
  static constexpr source_location current(const char* file = __builtin_FILE(),
                                           unsigned line = __builtin_LINE()) {
    source_location here;
    here.file_ = file;
    here.line_ = line;
    return here;
  }
  constexpr const char* file_name() const { return file_; }
  constexpr unsigned line() const { return line_; }

 private:
  const char* file_ = "";
  unsigned line_ = 0;
};
}  // namespace std
#endif
