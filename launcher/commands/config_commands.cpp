#include <ostream>

#include "configs/loader/check.h"
#include "configs/loader/config_io.h"
#include "launcher/commands.h"

namespace birkhoff {

int config_print_command(const std::string& file, const std::vector<std::string>& settings,
                         std::ostream& out, std::ostream& err) {
  const configs::Config config = load_config(file, settings, UselessValues::kKeep);
  for (const UselessValue& value : useless_values(config)) {
    err << "birkhoff: warning: " << value.path << ": " << value.what << '\n';
  }
  out << config_text(config);
  return 0;
}

int config_diff_command(const std::string& before, const std::string& after, std::ostream& out) {
  for (const ConfigDifference& difference :
       diff_configs(load_config(before, {}, UselessValues::kKeep),
                    load_config(after, {}, UselessValues::kKeep))) {
    out << difference.path << ": " << difference.before << " -> " << difference.after
        << (difference.fixed ? "  (fixed: cannot change on resume)" : "") << '\n';
  }
  return 0;
}

int config_reference_command(std::ostream& out) {
  out << config_reference();
  return 0;
}

}  // namespace birkhoff
