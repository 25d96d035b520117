#include "configs/loader/config_io.h"

#include <google/protobuf/text_format.h>

#include <algorithm>

#include "cluster/base/files/file.h"
#include "configs/loader/check.h"
#include "configs/loader/message_text.h"
#include "configs/loader/source_locations.h"
#include "configs/loader/text_parser.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxIncludeDepth = 32;
constexpr int kMaxFiles = 256;  // two includes per file, 32 deep, would be four billion

struct Source {
  configs::Config config;
  SourceLocations places;
};

// Configs of earlier versions say `zero: true` for `zero_stage: 1`.
void convert_replaced_fields(configs::Config& config, SourceLocations& places) {
  if (!config.train().has_zero()) return;
  auto& train = *config.mutable_train();
  train.set_zero_stage(train.zero() ? 1 : 0);
  train.clear_zero();
  places.set("train.zero_stage", places.of("train.zero"));
}

Source parse_source(const std::string& text, const std::string& name) {
  Source source{{}, SourceLocations(name)};
  if (const auto error = parse_text(text, source.config, name, &source.places)) {
    fail(ExitCode::kConfig, "{}:{}:{}: {}{}{}", name, error->line, error->column, error->path,
         error->path.empty() ? "" : ": ", error->what);
  }
  if (source.config.train().has_zero() && source.config.train().has_zero_stage()) {
    config_error(source.places, "train.zero",
                 "is the former name of zero_stage; set only one of them");
  }
  convert_replaced_fields(source.config, source.places);
  return source;
}

// Reads a file and its includes. Identifies files by their real paths, with links and ".."
// resolved.
class Loader {
 public:
  Source load(const fs::path& file) { return load(file, file.string() + ": "); }

 private:
  // Messages about the file itself start with `blame`.
  Source load(const fs::path& file, const std::string& blame) {
    const fs::path real = real_path(file, blame);
    if (open_.empty()) root_ = real.parent_path();
    check_include(real, blame);
    open_.push_back(real);
    Source source =
        parse_source(read_file(real.string(), kMaxTextBytes, ExitCode::kConfig), file.string());
    Source merged{{}, SourceLocations(file.string())};
    for (int i = 0; i < source.config.include_size(); ++i) {
      const std::string path = fmt::format("include.{}", i);
      const std::string& include = source.config.include(i);
      const std::string at = fmt::format("{}: include: ", source.places.of(path));
      const bool is_one_line = std::none_of(include.begin(), include.end(),
                                            [](unsigned char c) { return c < 0x20 || c == 0x7f; });
      if (include.empty() || fs::path(include).is_absolute() || !is_one_line) {
        fail(ExitCode::kConfig,
             "{}{} must be a path relative to this file, without control characters", at,
             quoted(include));
      }
      const Source included = load(file.parent_path() / include, at);
      override_config(merged.config, merged.places, included.config, included.places);
    }
    source.config.clear_include();
    override_config(merged.config, merged.places, source.config, source.places);
    open_.pop_back();
    return merged;
  }

  static fs::path real_path(const fs::path& file, const std::string& blame) {
    std::error_code error;
    const fs::path real = fs::canonical(file, error);
    const std::string subject =
        blame + (blame.starts_with(file.string()) ? "" : file.string() + ": ");
    if (error) fail(ExitCode::kConfig, "{}cannot be opened: {}", subject, error.message());
    const fs::file_status status = fs::status(real, error);
    if (fs::is_directory(status))
      fail(ExitCode::kConfig, "{}is a folder, not a .txtpb file", subject);
    if (!fs::is_regular_file(status)) fail(ExitCode::kConfig, "{}is not a regular file", subject);
    return real;
  }

  void check_include(const fs::path& real, const std::string& blame) {
    const auto [root_end, _] = std::mismatch(root_.begin(), root_.end(), real.begin(), real.end());
    if (root_end != root_.end()) {
      fail(ExitCode::kConfig, "{}{} is outside the folder of the first file, {}", blame,
           real.string(), root_.string());
    }
    if (const auto it = std::find(open_.begin(), open_.end(), real); it != open_.end()) {
      std::string cycle;
      for (auto file = it; file != open_.end(); ++file) cycle += file->filename().string() + " -> ";
      fail(ExitCode::kConfig, "{}includes form a cycle: {}{}", blame, cycle,
           real.filename().string());
    }
    if (open_.size() > kMaxIncludeDepth) {
      fail(ExitCode::kConfig, "{}includes are nested deeper than {}", blame, kMaxIncludeDepth);
    }
    if (++num_files_ > kMaxFiles) {
      fail(ExitCode::kConfig, "{}more than {} files are included", blame, kMaxFiles);
    }
  }

  fs::path root_;
  std::vector<fs::path> open_;  // the file being read and those that include it
  int num_files_ = 0;
};

// True for a pipe or a file in memory, which a path like /dev/fd/63 can name.
bool has_no_folder(const fs::path& file) {
  std::error_code error;
  const fs::file_status status = fs::status(file, error);
  if (fs::is_fifo(status)) return true;
  const fs::path real = fs::canonical(file, error);
  return fs::is_regular_file(status) && real.empty();
}

void refuse_useless_values(const Source& source) {
  for (const UselessValue& value : useless_values(source.config)) {
    config_error(source.places, value.path, "{}", value.what);
  }
}

// The source with the settings, checked and resolved.
Source finish(Source source, const std::vector<std::string>& settings) {
  for (const std::string& setting : settings) {
    apply_setting(setting, source.config, source.places);
    convert_replaced_fields(source.config, source.places);
  }
  check_values(source.config, source.places);
  resolve(source.config);
  check_consistency(source.config, source.places);
  return source;
}

Source parse(const std::string& text, const std::string& name,
             const std::vector<std::string>& settings) {
  Source source = parse_source(text, name);
  if (source.config.include_size() > 0) {
    config_error(source.places, "include.0", "a text that is not a file cannot include files");
  }
  return finish(std::move(source), settings);
}

}  // namespace

configs::Config load_config(const std::filesystem::path& file,
                            const std::vector<std::string>& settings, UselessValues useless) {
  if (file.empty()) fail(ExitCode::kConfig, "the configuration's file name is empty: No such file");
  Source source = has_no_folder(file)
                      ? parse(read_stream(file.string(), kMaxTextBytes, ExitCode::kConfig),
                              file.string(), settings)
                      : finish(Loader().load(file), settings);
  check_trains(source.config, source.places);
  if (useless == UselessValues::kRefuse) refuse_useless_values(source);
  return std::move(source.config);
}

configs::Config parse_config(const std::string& text, const std::string& name,
                             const std::vector<std::string>& settings) {
  return parse(text, name, settings).config;
}

std::string config_text(const configs::Config& config) {
  google::protobuf::TextFormat::Printer printer;
  printer.SetPrintMessageFieldsInIndexOrder(true);
  printer.SetUseUtf8StringEscaping(true);
  std::string text;
  require(printer.PrintToString(config, &text), "a config cannot be printed");
  return text;
}

}  // namespace birkhoff
