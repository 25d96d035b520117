#include "data/prepare/text_kind.h"

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"

namespace birkhoff {
namespace {

struct Compression {
  std::string_view start;  // the first bytes of a file
  const char* name;
  const char* reader;  // the command that prints the text of such a file
};
constexpr Compression kCompressions[] = {
    {"\x1f\x8b", "gzip", "zcat"},
    {"\x28\xb5\x2f\xfd", "zstd", "zstdcat"},
    {"BZh91AY&SY", "bzip2", "bzcat"},
    {"\xfd"
     "7zXZ",
     "xz", "xzcat"},
    {"PK\x03\x04", "zip", "unzip -p"},
};
constexpr std::size_t kUtf16 = std::size(kCompressions), kUtf32 = kUtf16 + 1,
                      kByteOrderMark = kUtf16 + 2, kBinary = kUtf16 + 3;

// Index in kCompressions, kUtf16, kUtf32, or kBinary for none of them.
std::size_t kind_of(std::string_view start) {
  using namespace std::string_view_literals;
  for (std::size_t kind = 0; kind < std::size(kCompressions); ++kind) {
    if (start.starts_with(kCompressions[kind].start)) return kind;
  }
  // UTF-32's little-endian mark begins with UTF-16's, whose texts hold no NUL.
  if (start.starts_with("\xff\xfe\0\0"sv) || start.starts_with("\0\0\xfe\xff"sv)) return kUtf32;
  const bool is_utf16 = start.starts_with("\xff\xfe") || start.starts_with("\xfe\xff");
  return is_utf16 ? kUtf16 : kBinary;
}

std::string name_of(std::size_t kind) {
  if (kind == kUtf16) return "UTF-16";
  if (kind == kUtf32) return "UTF-32";
  return fmt::format("{} data", kCompressions[kind].name);
}

std::string pipe_of(std::size_t kind, const std::string& path) {
  const std::string reader = kind < std::size(kCompressions)
                                 ? kCompressions[kind].reader
                                 : fmt::format("iconv -f {} -t UTF-8", name_of(kind));
  return fmt::format("{} {}| birkhoff ... -", reader, path == kStandardInput ? "" : path + " ");
}

}  // namespace

void require_not_packed(const std::string& shown_path, std::string_view start) {
  const std::size_t kind = kind_of(start);
  if (kind == kBinary) return;
  fail(ExitCode::kData, "{}: holds {}, not UTF-8 text, from byte 0 on; give its text: {}",
       shown_path, name_of(kind), pipe_of(kind, shown_path));
}

void TextChecker::note(std::size_t kind, const Document& document) {
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
                                  name_of(kind), seen.documents == 1 ? "it is" : "they are", first,
                                  pipe_of(kind, seen.first)));
    }
  }
  return lines;
}

}  // namespace birkhoff
