#include "data/prepare/input/text_kind.h"

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "cluster/base/text/utf8.h"

namespace birkhoff {
namespace {

constexpr std::size_t kByteOrderMark = kNumPackings, kBinary = kByteOrderMark + 1;

// What a user can leave out.
const char* unit_of(const Document& document) {
  if (!document.text) return "file";
  if (document.of_pair) return "pair";
  return document.label.empty() ? "document" : "row";
}

}  // namespace

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
    const std::size_t kind = packing_of(part);
    if (kind != kNumPackings) {
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
           document.text ? " of its text" : "", unit_of(document));
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
         document.text ? " of its text" : "", tokenizer_, unit_of(document));
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
                                  first, pipe_of(kPackings[kind], seen.first)));
    }
  }
  return lines;
}

}  // namespace birkhoff
