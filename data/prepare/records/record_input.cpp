#include "data/prepare/records/record_input.h"

#include <sys/stat.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/message_text.h"

namespace birkhoff {

std::string folder_of(const Document& file) {
  const std::size_t slash = file.name.rfind('/');
  return slash == std::string::npos ? "" : file.name.substr(0, slash);
}

std::string lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return text;
}

bool has_suffix(const std::string& path, const std::vector<std::string>& suffixes) {
  const std::string name = lower_case(path);
  return std::ranges::any_of(suffixes, [&](const std::string& end) { return name.ends_with(end); });
}

RecordInput::RecordInput(const RecordOptions& options, const RecordNouns& nouns,
                         const Context& context)
    : options_(options), nouns_(nouns), context_(context) {
  for (const InputPath& input : context.inputs) given_.insert(input.path);
}

void RecordInput::find() {
  context_.progress.begin(fmt::format("find {}", nouns_.rows), 0);
  is_finding_ = true;
  scan_ = for_each([](const InputRow&) {});
  is_finding_ = false;
  context_.progress.end(false);
  if (num_left_out_ == 1) {
    notes_.push_back(
        fmt::format("left out {}, whose name is not that of {}", left_out_, nouns_.a_row));
  }
  if (num_left_out_ > 1) {
    notes_.push_back(fmt::format("left out {} and {}, whose names are not those of {}", left_out_,
                                 counted(num_left_out_ - 1, "more file"), nouns_.rows));
  }
  if (!labeled_.empty() && !unlabeled_.empty()) {
    fail(ExitCode::kUsage, "{}: has no class, but {} has; {}, or give --unlabeled", unlabeled_,
         labeled_, nouns_.gives_class);
  }
  if (has_classes()) context_.classes.finish(context_.inputs.front().path);
}

InputScan RecordInput::for_each(const std::function<void(const InputRow&)>& visit) {
  DocumentCounts counts;
  Xxh3Hasher hasher;
  const InputScan files = for_each_document(
      context_.inputs, context_.folder.path(),
      [&](const Document& file) {
        const FileRows* held = rows_in(file);
        if (is_finding_) context_.progress.add(file.bytes);
        if (held == nullptr) return;
        add_companion(file, *held, hasher);
        visit_rows(file, *held, counts, visit);
      },
      EmptyFiles::kVisit);
  InputScan rows = counts.scan(files);
  hasher.update(files.hash.data(), files.hash.size());
  rows.hash = hasher.hex_digest();
  return rows;
}

void RecordInput::damaged(const std::string& reason, Damages& damages) const {
  if (!options_.skip_damaged)
    fail(ExitCode::kData, "{}; repair or remove it, or give --skip-damaged", reason);
  damages.add(printable(reason));
}

void RecordInput::leave_out(const Document& file) {
  if (num_left_out_++ == 0) left_out_ = printable(file.path);
}

bool RecordInput::reads_file(const std::function<void()>& read) {
  try {
    read();
    return true;
  } catch (const Error& error) {
    if (error.code() != ExitCode::kData) throw;
    damaged(error.what(), damages_);
    return false;
  }
}

void RecordInput::note_file(const Document& file, bool has_class) {
  bytes_ += file.bytes;
  if (!options_.labels) return;
  std::string& first = has_class ? labeled_ : unlabeled_;
  if (first.empty()) first = file.shown_path;
}

void RecordInput::add_class(const Document& file, const std::string& label) {
  if (!options_.labels) return;
  Document labeled = file;
  labeled.label = label;
  context_.classes.add(labeled);
}

void RecordInput::add_companion(const Document& file, const FileRows& held,
                                Xxh3Hasher& hasher) const {
  const std::string path = companion(file, held);
  struct stat info;
  if (path.empty() || !find_status(path, /*follow_links=*/true, &info)) return;
  const std::string entry =
      fmt::format("{} {} {}\n", file.name, info.st_size, modification_time(info));
  hasher.update(entry.data(), entry.size());
}

void RecordInput::visit_rows(const Document& file, const FileRows& held, DocumentCounts& counts,
                             const std::function<void(const InputRow&)>& visit) const {
  Document document = file;
  document.bytes = 1;
  document.is_whole = true;
  const std::string folder = folder_of(file);
  if (held.is_row) {
    if (has_classes()) document.label = folder;
    counts.add(document);
    return visit({document, {file.path, -1}, file.bytes});
  }
  for (std::int64_t i = 0; i < held.rows; ++i) {
    document.name = fmt::format("{}:{}", file.name, i);
    document.shown_path = fmt::format("{}:{}", file.shown_path, i);
    counts.add(document);
    const auto up_to = [&](std::int64_t end) { return file.bytes * end / held.rows; };
    visit({document, {file.path, i}, up_to(i + 1) - up_to(i)});
  }
}

}  // namespace birkhoff
