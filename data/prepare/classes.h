// The classes of a labeled corpus: the labels and their values.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "data/prepare/input/documents.h"

namespace birkhoff {

class Classes {
 public:
  // names: of the values 0, 1, ... if they are known beforehand. If empty, they are the labels that
  // add() sees, sorted: by number if all are integers, else by bytes.
  // item, doubt: the noun for what has a label, and advice if there are too many or too few.
  explicit Classes(std::vector<std::string> names, const char* item = "row",
                   const char* doubt = "is that the label column?");

  // Takes the label of a row into account. Error(kData) if it is none of the known ones, or one too
  // many.
  void add(const Document& row);
  // Call after the last row. Error(kData), which begins with `path`, if there are fewer than two
  // classes.
  void finish(const std::string& path);

  const std::vector<std::string>& names() const { return names_; }
  // The value of a row's label. Error(kData) if add() has not seen it.
  std::int64_t value_of(const Document& row) const;

 private:
  const bool known_;
  const char *item_, *doubt_;
  std::vector<std::string> names_;
  std::map<std::string, std::int64_t, std::less<>> values_;
  std::int64_t bytes_ = 0;  // of all labels
};

}  // namespace birkhoff
