// The output of a command line that runs in the test's own process.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "launcher/app.h"

namespace birkhoff {

struct Said {
  int code = -1;
  std::string out, err;
};

inline Said birkhoff_says(const std::vector<std::string>& arguments) {
  std::ostringstream out, err;
  const int code = run_app(arguments, out, err);
  return {code, out.str(), err.str()};
}

}  // namespace birkhoff
