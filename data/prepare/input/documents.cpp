#include "data/prepare/input/documents.h"

#include <fmt/compile.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/utf8.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"

namespace birkhoff {
namespace {

// Whether a file is the manifest of a corpus, valid or not, judging by its first field.
bool is_corpus_manifest(const std::string& path) {
  const File file = File::open_for_read(path, ExitCode::kData);
  std::string start(static_cast<std::size_t>(std::min<std::int64_t>(file.size(), 4096)), '\0');
  file.pread_exact(start.data(), start.size(), 0);
  return start.find(fmt::format("\"{}\"", shard_format::kManifestFormat)) != std::string::npos;
}

class Walk {
 public:
  Walk(const std::vector<InputPath>& paths, const std::string& except,
       const std::function<void(const Document&)>& visit, EmptyFiles empty)
      : visit_(visit), empty_(empty) {
    has_except_ = find_status(except, /*follow_links=*/true, &except_);
    scan_.input_bytes.resize(paths.size() > kMaxInputs ? 1 : paths.size());
    for (const InputPath& input : paths) note_given(input);
    for (std::size_t i = 0; i < paths.size(); ++i) {
      input_ = scan_.input_bytes.size() == 1 ? 0 : i;
      argument(paths[i]);
    }
    scan_.hash = hasher_.hex_digest();
  }

  const InputScan& scan() const { return scan_; }

 private:
  using FileId = std::pair<dev_t, ino_t>;

  void note_given(const InputPath& input) {
    if (!input.content_hash.empty()) return;
    note_given(input.path);
    if (!input.source.empty()) note_given(input.source);
  }

  void note_given(const std::string& path) {
    struct stat info;
    if (!find_status(path, /*follow_links=*/true, &info, ExitCode::kUsage)) {
      fail(ExitCode::kUsage, "{}: {}; give an existing file or folder", path, std::strerror(errno));
    }
    const auto [other, is_new] = given_.emplace(FileId{info.st_dev, info.st_ino}, path);
    if (!is_new) fail_twice(path, other->second);
  }

  [[noreturn]] static void fail_twice(const std::string& path, const std::string& other) {
    fail(ExitCode::kUsage, "{}: is given twice{}; give each text once", path,
         path == other ? "" : ", also as " + other);
  }

  // For an entry of a folder: if its path was also given by itself, it is read a second time here.
  void require_not_given(const std::string& path, const struct stat& info) const {
    const auto found = given_.find({info.st_dev, info.st_ino});
    if (found != given_.end()) fail_twice(path, found->second);
  }

  void argument(const InputPath& input) {
    split_ = input.split;
    if (split_ != kTrain) {  // the entry of a file never begins with a letter
      const std::string entry = fmt::format("{}\n", kSplitNames[split_]);
      hasher_.update(entry.data(), entry.size());
    }
    if (!input.content_hash.empty()) {
      return file(input.copy, input.path == "-" ? kStandardInput : input.path, input.name,
                  input.content_bytes, input.content_hash);
    }
    if (!input.source.empty()) return pair(input);
    const struct stat info = status_of(input.path);
    if (S_ISDIR(info.st_mode)) {
      folder(input.path, "");
    } else {
      file(input.path, input.path, std::filesystem::path(input.path).filename().string(),
           info.st_size, modification_time(info));
    }
  }

  static struct stat status_of(const std::string& path) {
    struct stat info;
    if (!find_status(path, /*follow_links=*/true, &info, ExitCode::kUsage))
      fail(ExitCode::kData, "{}: has disappeared; start the command again", path);
    return info;
  }

  // The files of sources and of targets are one document.
  void pair(const InputPath& input) {
    const auto part = [&](const std::string& path) {
      const struct stat info = status_of(path);
      if (!S_ISREG(info.st_mode)) {
        fail(ExitCode::kUsage,
             "{}: is no regular file; pairs are the lines of two files, which are read at the same "
             "time",
             path);
      }
      Document document{.path = path,
                        .shown_path = path,
                        .name = std::filesystem::path(path).filename().string(),
                        .bytes = info.st_size,
                        .split = split_,
                        .input = static_cast<std::int64_t>(input_),
                        .of_pair = true};
      hash(document.name, document.bytes, modification_time(info));
      return document;
    };
    const Document source = part(input.source);
    Document target = part(input.path);
    target.partner = &source;
    visit(target);
  }

  void folder(const std::string& path, const std::string& prefix) {
    for (const std::string& name : list_directory(path, ExitCode::kData)) {
      const std::string inner = path + "/" + name;
      struct stat info;
      if (!find_status(inner, /*follow_links=*/false, &info, ExitCode::kData)) {
        fail(ExitCode::kData, "{}: disappeared while the folder was read; start the command again",
             inner);
      }
      if (S_ISREG(info.st_mode)) {
        if (name == kCorpusManifestName && is_corpus_manifest(inner)) {
          fail(ExitCode::kUsage,
               "{}: is a corpus, not text; give the text that it was made from, or move it out of "
               "the input",
               path);
        }
        require_not_given(inner, info);
        file(inner, inner, prefix + name, info.st_size, modification_time(info));
      } else if (S_ISDIR(info.st_mode)) {
        const bool is_except =
            has_except_ && info.st_dev == except_.st_dev && info.st_ino == except_.st_ino;
        if (is_except) continue;
        require_not_given(inner, info);
        folder(inner, prefix + name + "/");
      } else {
        ++scan_.not_regular;
      }
    }
  }

  // stamp: changes when the content does.
  void file(const std::string& path, const std::string& shown_path, const std::string& name,
            std::int64_t bytes, const std::string& stamp) {
    hash(name, bytes, stamp);
    if (bytes == 0 && empty_ == EmptyFiles::kSkip) {
      ++scan_.empty_files;
      return;
    }
    visit({path, shown_path, name, bytes, split_, static_cast<std::int64_t>(input_)});
  }

  void hash(const std::string& name, std::int64_t bytes, const std::string& stamp) {
    // Lengths come first, so that no two lists of names yield the same text.
    const std::string entry = fmt::format("{}:{} {} {}\n", name.size(), name, bytes, stamp);
    hasher_.update(entry.data(), entry.size());
  }

  void visit(const Document& document) {
    ++scan_.documents;
    ++scan_.documents_of[split_];
    scan_.bytes += document.bytes;
    scan_.input_bytes[input_] += document.bytes;
    visit_(document);
  }

  const std::function<void(const Document&)>& visit_;
  const EmptyFiles empty_;
  std::map<FileId, std::string> given_;  // given paths by the file they name
  struct stat except_;
  bool has_except_;
  Xxh3Hasher hasher_;
  InputScan scan_;
  // Of the path that is being walked.
  SplitIndex split_ = kTrain;
  std::size_t input_ = 0;
};

std::size_t cut_of(std::string_view text) {
  const std::size_t newline = text.rfind('\n');
  if (newline != std::string_view::npos) return newline + 1;
  const std::size_t space = text.rfind(' ');
  if (space != std::string_view::npos && space > 0) return space;
  const std::size_t whole = complete_utf8(text);
  return whole > 0 ? whole : text.size();
}

}  // namespace

std::string modification_time(const struct stat& info) {
  return fmt::format("{}.{:09}", info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
}

InputScan for_each_document(const std::vector<InputPath>& paths, const std::string& except,
                            const std::function<void(const Document&)>& visit, EmptyFiles empty) {
  return Walk(paths, except, visit, empty).scan();
}

PartOfFile::PartOfFile(const Document& file)
    : shown_path_bytes_(file.shown_path.size()), name_bytes_(file.name.size()), document_(file) {}

Document& PartOfFile::of(std::string_view text, std::string_view unit, std::int64_t number) {
  const auto replace_end = [number](std::string& name, std::size_t begin, std::string_view before) {
    name.resize(begin);
    name += before;
    fmt::format_to(std::back_inserter(name), FMT_COMPILE("{}"), number);
  };
  replace_end(document_.shown_path, shown_path_bytes_, unit);
  replace_end(document_.name, name_bytes_, ":");
  document_.bytes = std::ssize(text);
  document_.text = text;
  return document_;
}

bool DocumentCounts::add(const Document& document) {
  if (document.bytes == 0) {
    ++counted_.empty_texts;
    return false;
  }
  ++counted_.documents;
  ++counted_.documents_of[document.split];
  counted_.bytes += document.bytes + (document.partner == nullptr ? 0 : document.partner->bytes);
  const auto input = static_cast<std::size_t>(document.input);
  if (input >= counted_.input_bytes.size()) counted_.input_bytes.resize(input + 1);
  counted_.input_bytes[input] += document.bytes;
  return true;
}

InputScan DocumentCounts::scan(InputScan files) const {
  files.documents = counted_.documents;
  files.bytes = counted_.bytes;
  files.documents_of = counted_.documents_of;
  files.empty_texts = counted_.empty_texts;
  const std::size_t num_inputs = files.input_bytes.size();
  files.input_bytes = counted_.input_bytes;
  files.input_bytes.resize(num_inputs);
  return files;
}

void DocumentReader::read(char* out, std::size_t num_bytes, std::int64_t offset) {
  if (document_.text) {
    document_.text->copy(out, num_bytes, static_cast<std::size_t>(offset));
    return;
  }
  if (!document_.packed) {
    if (!file_) file_ = File::open_for_read(document_.path, ExitCode::kData);
    return file_->pread_exact(out, num_bytes, offset);
  }
  if (!unpacked_ || offset < at_) {
    unpacked_.emplace(File::open_for_read(document_.path, ExitCode::kData), document_.shown_path);
    at_ = 0;
  }
  const std::int64_t end = offset + static_cast<std::int64_t>(num_bytes);
  std::vector<char> skipped(
      static_cast<std::size_t>(std::min<std::int64_t>(offset - at_, 1 << 20)));
  while (at_ < end) {
    const bool before = at_ < offset;
    const std::size_t got =
        before ? unpacked_->read_some(skipped.data(), static_cast<std::size_t>(std::min(
                                                          offset - at_, std::ssize(skipped))))
               : unpacked_->read_some(out + (at_ - offset), static_cast<std::size_t>(end - at_));
    if (got == 0) {
      fail(ExitCode::kData, "{}: became shorter while it was read; start the command again",
           document_.shown_path);
    }
    at_ += static_cast<std::int64_t>(got);
  }
}

void for_each_chunk(DocumentReader& reader, std::int64_t begin, std::int64_t end,
                    std::int64_t chunk_bytes,
                    const std::function<void(std::string_view, std::int64_t)>& visit) {
  const Document& document = reader.document();
  std::string buffer;  // begins with what the last cut left
  for (std::int64_t offset = begin; offset < end;) {
    const std::int64_t rest = end - offset;
    const auto bytes = static_cast<std::size_t>(std::min(rest, chunk_bytes));
    std::string_view text;
    if (document.text) {
      text = document.text->substr(static_cast<std::size_t>(offset), bytes);
    } else {
      const std::size_t had = buffer.size();
      buffer.resize(bytes);
      reader.read(buffer.data() + had, bytes - had, offset + static_cast<std::int64_t>(had));
      text = buffer;
    }
    if (rest > chunk_bytes) text = text.substr(0, cut_of(text));
    visit(text, offset);
    const std::size_t used = text.size();
    buffer.erase(0, used);
    offset += static_cast<std::int64_t>(used);
  }
}

}  // namespace birkhoff
