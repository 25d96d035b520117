#include "configs/loader/site_io.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <regex>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/number_text.h"
#include "configs/loader/check.h"
#include "configs/loader/message_text.h"
#include "configs/loader/source_locations.h"
#include "configs/loader/text_parser.h"

namespace birkhoff {
namespace {

bool is_assignment(const std::string& text) {
  const auto is_of_name = [](unsigned char c) {
    return c < 0x80 && (std::isalnum(c) != 0 || c == '_');
  };
  const auto end = std::find(text.begin(), text.end(), '=');
  return end != text.end() && end != text.begin() &&
         std::isdigit(static_cast<unsigned char>(text[0])) == 0 &&
         std::all_of(text.begin(), end, is_of_name);
}

// Refuses the entries of a list that are not sound.
template <typename IsSound>
void check_entries(const google::protobuf::RepeatedPtrField<std::string>& entries, const char* list,
                   const SourceLocations& places, const char* what, const IsSound& is_sound) {
  for (int i = 0; i < entries.size(); ++i) {
    if (is_sound(entries[i])) continue;
    config_error(places, fmt::format("{}.{}", list, i), "{} {}", quoted(entries[i]), what);
  }
}

void check_excluded(const configs::Site& site, const SourceLocations& places) {
  for (int i = 0; i < site.exclude_size(); ++i) {
    if (!site.exclude(i).empty()) continue;
    config_error(places, fmt::format("exclude.{}", i), "is empty: name a node, or remove it");
  }
}

// The fields about a node must agree.
void check_node(const configs::Site& site, const SourceLocations& places) {
  const int ranks = site.ranks_per_node(), gpus = site.gpus_per_node(), cpus = site.cpus_per_node();
  if (gpus > 0 && ranks > gpus) {
    config_error(places, "ranks_per_node",
                 "{} ranks do not fit {} GPUs: a rank needs one of its own; lower it to "
                 "gpus_per_node",
                 ranks, gpus);
  }
  const int cores = ranks * std::max(1, site.cpus_per_rank());
  if (cpus > 0 && cores > cpus) {
    config_error(places, site.cpus_per_rank() > 0 ? "cpus_per_rank" : "ranks_per_node",
                 "{} ranks of a node need {} cores, and cpus_per_node is {}: lower one of them",
                 ranks, cores, cpus);
  }
}

}  // namespace

configs::Site load_site(const std::filesystem::path& file) {
  const std::string name = file.string();
  const std::string text = read_stream(name, kMaxTextBytes, ExitCode::kConfig);
  configs::Site site;
  SourceLocations places(name);
  if (const auto error = parse_text(text, site, name, &places)) {
    fail(ExitCode::kConfig, "{}:{}:{}: {}{}{}", name, error->line, error->column, error->path,
         error->path.empty() ? "" : ": ", error->what);
  }
  check_values(site, places);
  if (!slurm_time(site.time_limit())) {
    config_error(places, "time_limit", "{} is not a time: write days-hours:minutes:seconds",
                 quoted(site.time_limit()));
  }
  check_entries(site.environment(), "environment", places, "must be NAME=value", is_assignment);
  // `module load` would read "-x" as an option.
  check_entries(site.modules(), "modules", places, "is not the name of a module",
                [](const std::string& module) { return !module.empty() && module[0] != '-'; });
  check_entries(site.sbatch(), "sbatch", places, "must be an option of sbatch: \"--mem=0\"",
                [](const std::string& option) { return option.starts_with('-'); });
  check_excluded(site, places);
  if (site.ranks_per_node() == 0) site.set_ranks_per_node(std::max(1, site.gpus_per_node()));
  check_node(site, places);
  return site;
}

std::optional<std::chrono::seconds> slurm_time(const std::string& text) {
  static const std::regex kTime(
      "(?:([0-9]{1,4})-)?([0-9]{1,8})(?::([0-9]{1,8}))?(?::([0-9]{1,8}))?");
  constexpr std::int64_t kMaxSeconds = std::int64_t{10} * 366 * 24 * 3600;
  std::smatch parts;
  if (!std::regex_match(text, parts, kTime)) return std::nullopt;
  const auto number = [&](int i) {
    return parse_number<std::int64_t>(parts[static_cast<std::size_t>(i)].str()).value_or(0);
  };
  // Without days, the first number is hours only if two more follow it.
  const bool starts_with_hours = parts[1].matched || parts[4].matched;
  const std::int64_t seconds =
      number(1) * 86400 + (starts_with_hours ? number(2) * 3600 + number(3) * 60 + number(4)
                                             : number(2) * 60 + number(3));
  if (seconds == 0 || seconds > kMaxSeconds) return std::nullopt;
  return std::chrono::seconds(seconds);
}

}  // namespace birkhoff
