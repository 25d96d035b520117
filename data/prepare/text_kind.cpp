#include "data/prepare/text_kind.h"

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"

namespace birkhoff {
namespace {

using namespace std::string_view_literals;

struct Packing {
  const char* name;
  const char* reader;      // the command that prints the text of such a file
  std::string_view start;  // the first bytes of a file
  std::string_view or_start = start;
};
constexpr Packing kPackings[] = {
    {"gzip data", "zcat", "\x1f\x8b"},
    {"zstd data", "zstdcat", "\x28\xb5\x2f\xfd"},
    {"bzip2 data", "bzcat", "BZh91AY&SY"},
    {"xz data", "xzcat",
     "\xfd"
     "7zXZ"},
    {"zip data", "unzip -p", "PK\x03\x04"},
    {"UTF-16", "iconv -f UTF-16 -t UTF-8", "\xff\xfe", "\xfe\xff"},
    {"UTF-32", "iconv -f UTF-32 -t UTF-8", "\xff\xfe\0\0"sv, "\0\0\xfe\xff"sv}};
constexpr std::size_t kByteOrderMark = std::size(kPackings), kBinary = kByteOrderMark + 1;

// Index in kPackings, or kBinary for none of them.
std::size_t kind_of(std::string_view start) {
  // From the end: UTF-32's little-endian mark begins with UTF-16's, whose texts hold no NUL.
  for (std::size_t kind = std::size(kPackings); kind-- > 0;) {
    const Packing& packing = kPackings[kind];
    if (start.starts_with(packing.start) || start.starts_with(packing.or_start)) return kind;
  }
  return kBinary;
}

std::string pipe_of(std::size_t kind, const std::string& path) {
  return fmt::format("{} {}| birkhoff ... -", kPackings[kind].reader,
                     path == kStandardInput ? "" : path + " ");
}

}  // namespace

void require_not_packed(const std::string& shown_path, std::string_view start) {
  const std::size_t kind = kind_of(start);
  if (kind == kBinary) return;
  fail(ExitCode::kData, "{}: holds {}, not UTF-8 text, from byte 0 on; give its text: {}",
       shown_path, kPackings[kind].name, pipe_of(kind, shown_path));
}

void TextChecker::note(std::size_t kind, const Document& document) {
  static_assert(kBinary < std::tuple_size_v<decltype(seen_)>);
  Seen& seen = seen_[kind];
  if (seen.documents++ == 0) seen.first = document.shown_path;
}

std::string_view TextChecker::check(const Document& document, std::string_view part,
                                    std::int64_t offset) {
  if (offset == 0) binary_ = false;
  if (offset == 0 && !document.text) {
    if (!takes_bytes_) require_not_packed(document.shown_path, part);
    const std::size_t kind = kind_of(part);
    if (kind != kBinary) {
      note(kind, document);
      binary_ = true;
    }
    if (part.starts_with(kUtf8Mark)) {
      note(kByteOrderMark, document);
      if (!takes_bytes_) {
        part.remove_prefix(kUtf8Mark.size());
        offset = kUtf8Mark.size();
      }
    }
  }
  if (const std::size_t nul = part.find('\0'); !binary_ && nul != std::string_view::npos) {
    if (!takes_bytes_) {
      fail(ExitCode::kData,
           "{}: byte {}{} is NUL, which text does not have; is it UTF-16 (`iconv -f UTF-16 -t "
           "UTF-8`)? Convert or leave out the {}, or use bytes",
           document.shown_path, offset + static_cast<std::int64_t>(nul),
           document.text ? " of its text" : "", document.text ? "row" : "file");
    }
    note(kBinary, document);
    binary_ = true;
  }
  if (takes_bytes_) return part;
  const std::size_t invalid = find_invalid_utf8(part);
  if (invalid != std::string_view::npos) {
    fail(ExitCode::kData,
         "{}: byte {}{} is not UTF-8, which --tokenizer {} needs; convert or leave out the {}, or "
         "use bytes",
         document.shown_path, offset + static_cast<std::int64_t>(invalid),
         document.text ? " of its text" : "", tokenizer_, document.text ? "row" : "file");
  }
  return part;
}

std::vector<std::string> TextChecker::notes() const {
  std::vector<std::string> lines;
  for (std::size_t kind = 0; kind < seen_.size(); ++kind) {
    const Seen& seen = seen_[kind];
    if (seen.documents == 0) continue;
    const std::string count = counted(seen.documents, "document");
    const std::string first =
        seen.documents == 1 ? seen.first : fmt::format("the first: {}", seen.first);
    if (kind == kByteOrderMark) {
      lines.push_back(fmt::format("{} the byte order mark at the start of {} ({})",
                                  takes_bytes_ ? "kept" : "dropped", count, first));
    } else if (kind == kBinary) {
      lines.push_back(
          fmt::format("warning: {} with NUL bytes, which text does not have ({})", count, first));
    } else {
      lines.push_back(fmt::format("warning: {} of {}, used as {} ({}); to use the text: {}", count,
                                  kPackings[kind].name, seen.documents == 1 ? "it is" : "they are",
                                  first, pipe_of(kind, seen.first)));
    }
  }
  return lines;
}

}  // namespace birkhoff
