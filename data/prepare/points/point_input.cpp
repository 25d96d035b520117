#include "data/prepare/points/point_input.h"

#include <filesystem>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/message_text.h"
#include "data/corpus/manifest.h"
#include "data/text/text_lines.h"

namespace birkhoff {
namespace {

constexpr char kNamesFile[] = "shape_names.txt";

std::string next_to(const std::string& path, const std::string& name) {
  return (std::filesystem::path(path).parent_path() / name).string();
}

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  TextLines text(File::open_for_read(path), path);
  while (const auto line = text.next()) {
    if (!line->empty()) lines.emplace_back(*line);
  }
  return lines;
}

// The names of the classes 0, 1, ... of a file, of the file next to it; empty: there is none.
std::vector<std::string> names_for(const std::string& path) {
  const std::string file = next_to(path, kNamesFile);
  if (!path_exists(file)) return {};
  const std::vector<std::string> lines = lines_of(file);
  const std::string defect = class_names_defect({lines.begin(), lines.end()});
  if (lines.empty() || !defect.empty()) {
    fail(ExitCode::kData, "{}: {}; repair it, or move it away to number the classes", file,
         lines.empty() ? "names no class" : defect);
  }
  return lines;
}

[[noreturn]] void fail_as_changed(const std::string& path) {
  fail(ExitCode::kData, "{}: changed while it was read; start the command again", path);
}

class PointRowReader final : public RowReader {
 public:
  explicit PointRowReader(const PointInput& input) : input_(input) {}

  void read(const std::vector<WantedRow>& wanted,
            const std::function<void(std::size_t, const ReadRow&)>& take) override {
    std::vector<WantedSet> sets;
    for (const WantedRow& row : wanted) sets.push_back({row.path, row.number});
    reader_.read(sets, [&](std::size_t i, const PointSet& set) {
      ReadRow row{.damage = set.damage, .values = set.values, .label = {}};
      if (row.damage.empty()) {
        input_.require_size(wanted[i].path, row.values.size());
        if (input_.has_classes()) row.label = input_.class_of(wanted[i].path, set.label);
      }
      take(i, row);
    });
  }

 private:
  const PointInput& input_;
  PointReader reader_;
};

}  // namespace

PointInput::PointInput(const PointOptions& options, const Context& context)
    : RecordInput(options, kPointNouns, context), options_(options) {}

const PointShape& PointInput::shape() const {
  if (!shape_) {
    fail(ExitCode::kData,
         "{}: no file of point sets can be read; without --skip-damaged, the "
         "first says why",
         context().inputs.front().path);
  }
  return *shape_;
}

configs::CorpusManifest::Record PointInput::record() const {
  return point_record(shape().points, shape().coordinates);
}

std::string PointInput::describe() const {
  return fmt::format("point sets {} x {}", shape().points, shape().coordinates);
}

std::unique_ptr<RowReader> PointInput::reader() const {
  return std::make_unique<PointRowReader>(*this);
}

std::string PointInput::class_of(const std::string& path, std::int64_t label) const {
  if (label < 0 || (!names_.empty() && label >= std::ssize(names_))) fail_as_changed(path);
  return names_.empty() ? std::to_string(label) : names_[static_cast<std::size_t>(label)];
}

void PointInput::require_size(const std::string& path, std::size_t bytes) const {
  if (bytes != static_cast<std::size_t>(shape().points * shape().coordinates) * sizeof(float))
    fail_as_changed(path);
}

std::string PointInput::companion(const Document& file, const FileRows& /*held*/) const {
  return next_to(file.path, kNamesFile);
}

const RecordInput::FileRows* PointInput::rows_in(const Document& file) {
  if (is_finding()) find_in(file);
  const auto found = files_.find(file.path);
  return found == files_.end() ? nullptr : &found->second;
}

void PointInput::find_in(const Document& file) {
  if (!has_suffix(file.name, {".h5", ".hdf5"}) && !is_given(file)) return leave_out(file);
  PointFileHead head;
  if (!reads_file([&] { head = reader_.inspect(file.path); })) return;
  note_shape(file, head.shape);
  note_file(file, /*has_class=*/!head.labels.empty());
  if (options_.labels && !head.labels.empty()) note_labels(file, head.labels);
  files_[file.path] = {.rows = head.sets};
  if (file.split != kTrain || warned_of_test_ ||
      lower_case(file.name.substr(file.name.rfind('/') + 1)).find("test") == std::string::npos)
    return;
  warned_of_test_ = true;
  add_note(fmt::format(
      "warning: {} is used for training (and fractions held out), although its name says test; "
      "give it with --test",
      printable(file.shown_path)));
}

void PointInput::note_shape(const Document& file, const PointShape& shape) {
  if (!shape_) {
    shape_ = shape;
    first_ = file.shown_path;
  }
  if (shape == *shape_) return;
  fail(ExitCode::kUsage,
       "{}: has sets of {} x {}, but {} has {} x {} (points x coordinates); prepare them apart",
       file.shown_path, shape.points, shape.coordinates, first_, shape_->points,
       shape_->coordinates);
}

void PointInput::note_labels(const Document& file, const std::vector<std::int64_t>& labels) {
  const std::vector<std::string> names = names_for(file.path);
  if (!names.empty() && labels.back() >= std::ssize(names)) {
    fail(ExitCode::kData,
         "{}: a set has the label {}, but {} names {}, from 0 on; repair one, or give --unlabeled",
         file.path, labels.back(), next_to(file.path, kNamesFile),
         counted(std::ssize(names), "class", "classes"));
  }
  note_names(file, names);
  for (const std::int64_t label : labels) add_class(file, class_of(file.path, label));
}

// Also those classes get a value that have no set.
void PointInput::note_names(const Document& file, const std::vector<std::string>& names) {
  if (first_labeled_.empty()) {
    first_labeled_ = file.shown_path;
    names_ = names;
    const bool are_known = !context().classes.names().empty();  // by --like
    if (!are_known) {
      for (const std::string& name : names) add_class(file, name);
    }
  }
  if (names == names_) return;
  const std::string& without = names.empty() ? file.shown_path : first_labeled_;
  if (names.empty() || names_.empty()) {
    fail(ExitCode::kUsage,
         "{}: has no {} next to it, but {} has one; give files with the same classes", without,
         kNamesFile, names.empty() ? first_labeled_ : file.shown_path);
  }
  fail(ExitCode::kUsage, "{}: {} differs from the one of {}; give files with the same classes",
       file.shown_path, kNamesFile, first_labeled_);
}

std::vector<std::string> without_lists(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (!has_suffix(path, {".txt"}) || !path_exists(path)) {
      files.push_back(path);
      continue;
    }
    const std::vector<std::string> lines = lines_of(path);
    if (lines.empty()) fail(ExitCode::kUsage, "{}: names no file; give the files themselves", path);
    for (const std::string& line : lines) {
      const std::string file = next_to(path, line.substr(line.rfind('/') + 1));
      if (!path_exists(file)) {
        fail(ExitCode::kUsage, "{}: names {}, but there is no {}; give the files themselves", path,
             quoted(line), file);
      }
      files.push_back(file);
    }
  }
  return files;
}

}  // namespace birkhoff
