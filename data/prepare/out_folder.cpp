#include "data/prepare/out_folder.h"

#include <sys/stat.h>

#include <regex>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/logging/log.h"
#include "data/corpus/manifest.h"
#include "data/corpus/record_shards.h"

namespace birkhoff {
namespace {

// A folder with this file and no manifest was left by an unfinished prepare. The file is also the
// lock against a second prepare.
constexpr char kUnfinishedName[] = ".unfinished";
constexpr char kSpoolPrefix[] = ".input-";
// Every name that prepare uses in the folder, including the names of temporary files.
constexpr char kOurNames[] =
    R"((train|valid|test)-(tokens|source|target|label|unknown|image|points)-\d{5,}\.h5(\.tmp)?)"
    R"(|((source_)?tokenizer\.(chars|words|whitespace|model)|manifest\.json)"
    R"(|\.finished-(train|valid|test)-\d{5,})(\.tmp-.+-\d+-[0-9a-f]{8})?)"
    R"(|\.input-\d+|\.unfinished)";

bool same_file(const std::string& a, const std::string& b) {
  struct stat info_a, info_b;
  return find_status(a, /*follow_links=*/true, &info_a, ExitCode::kUsage) &&
         find_status(b, /*follow_links=*/true, &info_b, ExitCode::kUsage) &&
         info_a.st_dev == info_b.st_dev && info_a.st_ino == info_b.st_ino;
}

bool is_ours(const std::string& name) { return std::regex_match(name, std::regex(kOurNames)); }

}  // namespace

OutFolder::OutFolder(std::string path) : path_(std::move(path)) {
  if (path_exists(path_) && !is_directory(path_))
    fail(ExitCode::kUsage, "--out {}: is a file; name a folder", path_);
  make_directory(path_);
}

void OutFolder::require_outside(const std::string& input) const {
  if (input == "-") return;
  if (same_file(input, path_) || same_file(parent_path(input), path_)) {
    fail(ExitCode::kUsage, "{}: lies in --out {}; name another folder, or move it out", input,
         path_);
  }
}

void OutFolder::begin() {
  const bool marked = path_exists(file(kUnfinishedName));
  finished_ = has_manifest();
  if (finished_ && !marked) return;
  if (!marked && !list_directory(path_).empty()) {
    fail(ExitCode::kUsage,
         "--out {}: is neither empty nor a corpus; name another folder, or empty this one", path_);
  }
  if (!finished_) require_only_leftovers();
  lock_.emplace(file(kUnfinishedName), "the corpus folder " + path_);
  if (!lock_->is_held()) {
    log_warning("{}: its file system has no locks (flock): start no second `prepare` there", path_);
  }
  sync_directory(path_);       // the mark must survive a crash if any other name does
  finished_ = has_manifest();  // another command may have finished before it released the lock
}

void OutFolder::spool(std::vector<InputPath>& inputs, ProgressReports& progress) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    struct stat info;
    const std::string& path = inputs[i].path;
    const bool is_stream =
        path == "-" || (find_status(path, /*follow_links=*/true, &info, ExitCode::kUsage) &&
                        !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode));
    if (is_stream) spool_one(inputs[i], i, progress);
  }
}

void OutFolder::end() {
  if (!lock_) return;
  for (const std::string& name : list_directory(path_)) {
    const bool is_temporary = name.starts_with(kSpoolPrefix) || name.starts_with(kFinishedPrefix);
    if (is_ours(name) && is_temporary) remove_file(file(name));
  }
  sync_directory(path_);  // the mark goes last: without it, a later command ignores the rest
  if (path_exists(file(kUnfinishedName))) remove_file(file(kUnfinishedName));
  sync_directory(path_);
}

bool OutFolder::has_manifest() const { return path_exists(file(kCorpusManifestName)); }

// Runs before the lock is taken, which writes a file: a folder with a foreign file stays as it is.
void OutFolder::require_only_leftovers() const {
  for (const std::string& name : list_directory(path_)) {
    if (is_ours(name)) continue;
    fail(ExitCode::kUsage,
         "--out {}: holds '{}', which prepare did not make; move it away, or name "
         "another folder",
         path_, name);
  }
}

void OutFolder::clear(const std::set<std::string>& keep) const {
  if (finished_) return;
  for (const std::string& name : list_directory(path_)) {
    if (is_ours(name) && name != kUnfinishedName && !keep.contains(name)) remove_file(file(name));
  }
}

void OutFolder::spool_one(InputPath& input, std::size_t number, ProgressReports& progress) {
  progress.begin("read standard input", 0);
  input.name = fmt::format("{}{}", kSpoolPrefix, number);
  File in = input.path == "-" ? File::standard_input()
                              : File::open_stream_for_read(input.path, ExitCode::kData);
  std::optional<File> out;
  if (!finished_) {
    const std::string copy = file(input.name);
    out = File::create(copy);
    copies_.push_back(File::open_for_read(copy));
    remove_file(copy);
    input.copy = copies_.back().descriptor_path();
  }
  Xxh3Hasher hasher;
  std::vector<char> part(1 << 20);
  while (const std::size_t got = in.read_some(part.data(), part.size())) {
    if (out) out->write_all(part.data(), got);
    hasher.update(part.data(), got);
    input.content_bytes += static_cast<std::int64_t>(got);
    progress.add(static_cast<std::int64_t>(got));
  }
  if (out) out->close();
  progress.end(false);
  input.content_hash = hasher.hex_digest();
}

}  // namespace birkhoff
